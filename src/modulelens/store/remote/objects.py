"""Objects in a folder of any file system that fsspec knows: put whole, listed, read. No meaning.

The only file that imports fsspec. A mounted folder is written to by draft and rename, since there
a reader would see half an object; object stores put whole ones by themselves.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from modulelens.errors import EnvironmentLacks, NotFound, PermissionDenied, Unavailable, UsageError
from modulelens.store.files import space_for, write_new
from modulelens.store.layout import listing
from modulelens.store.remote.spread import spread

_CONNECT_S, _READ_S = 5, 60
#: Drafts of writers that were killed stay for a day.
_STALE_S = 86_400.0
_RETRIES = {"total_max_attempts": 2, "mode": "standard"}
_DRAFTS = "tmp"
_SUCH = "such as s3://bucket/folder or file:///mnt/team"
_CHECK = "check the address"
_LOST = "if it was there, `modulelens push --again` puts it back"
_ROLE = "check the credentials, and the rights that the file system gives them"
#: Packages whose exceptions say that a service did not answer as it should.
_SERVICES = frozenset({"botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "adlfs", "azure"})
#: The file system in memory is a dict, and making what is not there takes two steps in it.
_turns = threading.Lock()


class Objects:
    """Objects below one URL, by relative names of plain words and slashes.

    Raises:
        EnvironmentLacks: fsspec, or the package of the URL's scheme, is not installed.
        UsageError: No file system has such a scheme.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        scheme = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise _lacks("fsspec", scheme) from error
        limits = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": _RETRIES}
        # One part of a file at a time: with more, each thread holds that many in memory.
        s3 = {"config_kwargs": limits, "max_concurrency": 1}
        known = {"use_listings_cache": False} | (s3 if scheme in ("s3", "s3a") else {})
        self._connect = partial(url_to_fs, url, **(known | dict(options)))
        self.url = url
        if scheme in ("http", "https"):
            raise UsageError(f"{url}: over {scheme} nothing can be listed or written", hint=_SUCH)
        self._turn: AbstractContextManager[Any] = _turns if scheme == "memory" else nullcontext()
        try:
            with self._told("connect"):
                self._connected, root = self._connect()
        except ImportError as error:
            raise _lacks(str(error), scheme) from error
        except ValueError as error:
            raise UsageError(f"{url}: {error}", hint=_SUCH) from error
        self._pid = os.getpid()
        self._root = str(root).rstrip("/")
        self._local = Path(self._root) if scheme in ("file", "local") else None
        self.far = scheme not in ("file", "local", "memory")
        self.exclusive = scheme in ("file", "local", "memory", "s3", "s3a", "gs", "gcs")

    @property
    def _fs(self) -> Any:
        if self._pid != os.getpid():  # forked: connections and threads are the parent's
            self._connected, self._pid = self._connect()[0], os.getpid()
        return self._connected

    def put(self, name: str, data: bytes) -> None:
        """Puts an object, in the place of the one that is there."""
        with self._told(f"write {name}"):
            if self._local is None:
                self._fs.pipe_file(self._path(name), data)
            else:
                self._drafted(self._local / name, data, os.replace)

    def make(self, name: str, data: bytes) -> bool:
        """Puts an object where there is none; False where there is one."""
        with self._told(f"write {name}"):
            try:
                if self._local is None:
                    self._fs.pipe_file(self._path(name), data, mode="create")
                else:
                    self._drafted(self._local / name, data, os.link)
            except PermissionError:
                raise
            except OSError:
                # Who refuses says so in many ways; and a make that was repeated meets itself.
                if self._size(name) is None:
                    raise
                return False
        return True

    def put_file(self, name: str, source: Path, *, again: bool = False) -> int:
        """Puts a file, `again`: also where one of its size is; returns the bytes that went."""
        with self._told(f"write {name}"):
            size = source.stat().st_size
            if not again and self._size(name) == size:
                return 0
            if self._local is None:
                self._fs.put_file(str(source), self._path(name))
            else:
                self._drafted(self._local / name, source, os.replace)
            return size

    def read(self, name: str) -> bytes:
        """The bytes of an object.

        Raises:
            NotFound: There is none.
        """
        with self._told(f"read {name}", hint=_LOST):
            return bytes(self._fs.cat_file(self._path(name)))

    def read_all(self, names: list[str]) -> dict[str, bytes]:
        """Those of the objects that are there."""

        def read(name: str) -> tuple[str, bytes | None]:
            try:
                return name, self.read(name)
            except NotFound:
                return name, None

        return {name: data for name, data in spread(read, names) if data is not None}

    def get_file(self, name: str, into: Path) -> None:
        """Brings an object into a new file.

        Raises:
            NotFound: There is none.
        """
        with self._told(f"read {name}", hint=_LOST), space_for(name, into.parent, 0):
            self._fs.get_file(self._path(name), str(into))

    def names(self, folder: str) -> list[str]:
        """The names of all objects in a folder, and in those in it, in their order as text."""
        with self._told(f"list {folder}", hint="make the bucket, or check the address"):
            path, cut = self._path(folder), len(self._root) + 1
            found = self._fs.find(path) if self._local is None else _files(path)
            return sorted(str(path)[cut:] for path in found)

    def remove(self, name: str) -> None:
        """Removes an object, where there is one."""
        with self._told(f"remove {name}"):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def sweep(self) -> None:
        """Removes what writers left that were killed a day ago or earlier."""
        if self._local is None:
            return
        with self._told("remove old drafts"):
            for draft in listing(self._local / _DRAFTS):
                with suppress(FileNotFoundError):  # another one sweeps too
                    if time.time() - draft.lstat().st_mtime > _STALE_S:
                        draft.unlink()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _size(self, name: str) -> int | None:
        try:
            return int(self._fs.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def _drafted(self, path: Path, data: bytes | Path, publish: Any) -> None:
        assert self._local
        draft = self._local / _DRAFTS / os.urandom(12).hex()
        nbytes = data.stat().st_size if isinstance(data, Path) else len(data)
        with space_for(path.name, self._local, nbytes):
            for folder in (path.parent, draft.parent):
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except FileExistsError as error:
                    raise NotADirectoryError(str(error)) from error
            try:
                if isinstance(data, Path):
                    shutil.copyfile(data, draft)
                else:
                    write_new(draft, data)
                _to_disk(draft)
                publish(draft, path)
            finally:
                draft.unlink(missing_ok=True)

    @contextmanager
    def _told(self, what: str, hint: str = _CHECK) -> Iterator[None]:
        try:
            with self._turn:
                yield
        except FileNotFoundError as error:
            raise NotFound(f"{self.url}: cannot {what}: it is not there", hint=hint) from error
        except PermissionError as error:
            raise PermissionDenied(
                f"{self.url}: no right to {what}: {error}", hint=_ROLE
            ) from error
        except NotImplementedError as error:
            text = f"{self.url}: this file system cannot {what}"
            raise UsageError(text, hint=_SUCH) from error
        except Exception as error:  # boundary: every file system has errors of its own
            service = type(error).__module__.partition(".")[0] in _SERVICES
            if not (service or isinstance(error, (OSError, TimeoutError))):
                raise
            text = f"{self.url}: cannot {what}: {type(error).__name__}: {error}"
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
                raise PermissionDenied(text, hint=_ROLE) from error
            hint = "it may be down, or the address wrong; try again"
            raise Unavailable(text, hint=hint) from error


def _files(folder: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for home, _, names in os.walk(folder, onerror=fail):  # fsspec skips what it may not read
        yield from (f"{home}/{name}" for name in names)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lacks(what: str, scheme: str) -> EnvironmentLacks:
    package = {"s3": " s3fs", "gs": " gcsfs", "gcs": " gcsfs"}.get(scheme, "")
    return EnvironmentLacks(
        f"{scheme}:// takes a package that is not installed: {what}",
        hint=f"pip install fsspec{package}",
    )
