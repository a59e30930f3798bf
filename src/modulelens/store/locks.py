"""Who may do what at the same time: flock on empty files, one writer, no gc during an add.

A dead process holds no flock, so nothing here ever has to be cleaned up or to time out by guess.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from modulelens.errors import Conflict, NotFound
from modulelens.records import Metadata
from modulelens.store.files import read_regular, space_for, write_new
from modulelens.store.layout import COLLECTION, Layout, listing


@contextmanager
def locked(path: Path, *, shared: bool = False, timeout_s: float = 600.0) -> Iterator[None]:
    """Holds the flock of `path`, which is created when missing.

    Raises:
        Conflict: Somebody else held it for all of `timeout_s` seconds.
    """
    descriptor = _open(path)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(
                    descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
                )
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise Conflict(
                        f"{path} is held by another process or thread for over {timeout_s:g} s",
                        hint="wait until the running add or gc has ended, then try again",
                    ) from error
            time.sleep(0.001)
        yield
    finally:
        _release(descriptor)


def _open(path: Path) -> int:
    with space_for(f"lock {path.name}", path.parent, 0):
        # A link would be followed to a file that is not the repo's.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _release(descriptor: int) -> None:
    # Unlocked, then closed: closing alone leaves the lock to children that were forked.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class Adds:
    """A shared flock from the first blob that is put to the entry that refers to it.

    gc takes the same lock exclusively, so it never sees a blob between `put` and the commit of
    its entry. A grace period would do without a lock, but gc right after a removal would then
    free nothing, and a slow add would lose its blobs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._descriptor: int | None = None
        self._depth = 0
        self._unclaimed: set[str] = set()
        self._unfinished: list[Callable[[], None]] = []
        self.present: dict[str, int] = {}  # digest -> size of blobs seen under this very hold

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps gc out for the block, and after it until all blobs put have an entry."""
        with self._mutex:
            if self._pid != os.getpid():  # forked: the hold is the parent's
                self._reset()
            if self._descriptor is None:
                descriptor = _open(self._path)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                self._descriptor = descriptor
            self._depth += 1
        try:
            yield
        finally:
            with self._mutex:
                self._depth -= 1
                self._release_when_done()

    def promise(self, blobs: dict[str, int], finish: Callable[[], None]) -> None:
        """Blobs that `finish` brings to the disk, digest -> size, and that wait for their entry."""
        with self._mutex:
            self._unclaimed.update(blobs)
            self.present.update(blobs)
            self._unfinished.append(finish)

    def finish(self) -> None:
        """Returns when all blobs are on the disk, or raises why one is not."""
        with self._mutex, ExitStack() as each:  # runs all of them, also when one fails
            while self._unfinished:
                each.callback(self._unfinished.pop())

    def settle(self, digests: Iterable[str]) -> None:
        """An entry that refers to these blobs is committed."""
        with self._mutex:
            self._unclaimed.difference_update(digests)

    def give_up(self) -> None:
        """Forgets blobs that wait for an entry: this process is not in an add, or failed in it."""
        with self._mutex:
            try:
                self.finish()
            finally:
                self._unclaimed.clear()
                self._release_when_done()

    def _release_when_done(self) -> None:
        if self._descriptor is not None and not self._depth and not self._unclaimed:
            _release(self._descriptor)
            self._descriptor = None
            self.present.clear()


class Changed:
    """What a writer has changed so far; `records` are those of its entries that are at hand."""

    def __init__(self, collections: Iterable[str]) -> None:
        self.versions: dict[str, set[int]] = {collection: set() for collection in collections}
        self.records: dict[str, Metadata] = {}
        self.indexed = False


@contextmanager
def writing(layout: Layout, collections: Iterable[str]) -> Iterator[Changed]:
    """Keeps other writers out of the block, and marks what it changes for the index.

    The marker names the collections from before the first commit until the index has the new rows.
    One that is there while nobody holds the lock is that of a writer that died in between: `settle`
    reads its collections again. Looking costs one listing of a folder that is nearly always empty.

    Raises:
        DiskFull: No space is left for the marker; nothing was changed.
    """
    changed = Changed(collections)
    marker = layout.changes / os.urandom(12).hex()
    text = "\n".join(changed.versions).encode()
    with locked(layout.writer_lock):
        try:
            with space_for(f"change of {len(changed.versions)} modules", layout.root, len(text)):
                write_new(marker, text)
            yield changed
        finally:
            if changed.indexed or not any(changed.versions.values()):
                marker.unlink(missing_ok=True)


def settle(
    layout: Layout, refresh: Callable[[Mapping[str, None]], bool], *, writable: bool
) -> None:
    """Reads the collections that dead writers left again, and removes their markers."""
    if not listing(layout.changes):
        return
    try:
        with locked(layout.writer_lock, timeout_s=0) if writable else nullcontext():
            for marker in listing(layout.changes):
                names = read_regular(marker).decode(errors="replace").split()
                if refresh(dict.fromkeys(filter(COLLECTION.fullmatch, names))) and writable:
                    marker.unlink()
    except (Conflict, NotFound):
        return  # a writer is at work, or was just now, and sees to its own
