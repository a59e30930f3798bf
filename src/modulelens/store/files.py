"""Single files: written whole or not at all, read only when regular, hashed once. Knows no repo."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modulelens.errors import Corrupted, DiskFull, NotFound

#: EFBIG is what a file size limit (`ulimit -f`) gives.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: JSON takes up to 20 times its size in memory.
MOST_JSON_BYTES = 64 << 20


@contextmanager
def space_for(what: str, path: Path, nbytes: int) -> Iterator[None]:
    """Turns a full disk inside the block into an error that says what was not stored.

    Raises:
        DiskFull: The disk, the quota or the file size limit is exhausted.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(
            f"no space left on {path}: {what} not stored, {nbytes:,} bytes needed",
            hint="free some space (`modulelens gc` removes what no entry needs) and add again",
        ) from error


def write_new(path: Path | str, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Writes a file that must not exist yet; what a failure leaves of it is the caller's."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | memoryview, *, tmp: Path, mode: int = 0o666) -> None:
    """Writes `path` so that a reader sees the old file or the whole new one; makes its folder.

    There is no fsync: kill -9 loses nothing, and after a power cut the digests name what is lost.
    """
    draft = f"{tmp}/{os.urandom(12).hex()}"  # random, because process ids come back
    try:
        write_new(draft, data, mode=mode)
        try:
            os.replace(draft, path)  # noqa: PTH105  a Path each is a tenth of a small file's time
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def size_of(path: Path) -> int | None:
    """Bytes of a file, None where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def stat_regular(path: Path) -> os.stat_result:
    """`lstat` of a regular file.

    Raises:
        NotFound: There is no such file.
        Corrupted: It is a symbolic link, a folder or a device.
    """
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"no file {path}") from error
    if not stat.S_ISREG(info.st_mode):
        raise Corrupted(f"{path} is not a regular file; links are refused")
    return info


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file that holds JSON.

    Raises:
        NotFound: There is no such file.
        Corrupted: It is a symbolic link, a folder or a device, or larger than any JSON here.
    """
    if (size := stat_regular(path).st_size) > MOST_JSON_BYTES:
        raise Corrupted(f"{path} has {size:,} bytes; at most {MOST_JSON_BYTES:,} are read as JSON")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"no file {path}") from error


class Verified:
    """Checks files against their digests, each once per process and state of the file."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[str, int, int, int]] = {}

    def check(self, path: Path, digest: str, *, what: str) -> os.stat_result:
        """`lstat` of a file whose bytes have this blake3 digest.

        Raises:
            NotFound: There is no such file.
            Corrupted: The bytes differ from the digest, or the file is not a regular one.
        """
        info = stat_regular(path)
        state = (digest, info.st_size, info.st_mtime_ns, info.st_ino)
        if self._seen.get(path) == state:
            return info
        found = digest_of_file(path)
        if found != digest:
            raise Corrupted(
                f"{what} is corrupted: {path} ({info.st_size:,} bytes) has the digest"
                f" {found[:16]}..., not {digest[:16]}...",
                hint="`modulelens fsck` lists the entries that need it; remove and add them again",
            )
        self._seen[path] = state
        return info


def digest_of(data: bytes | memoryview) -> str:
    """blake3 hex digest of a buffer. Releases the GIL while it hashes."""
    from blake3 import blake3

    return blake3(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """blake3 hex digest of a file's bytes; on all cores, except in a forked process."""
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO if _may_use_threads else 1).update_mmap(path).hexdigest()


_may_use_threads = True


def use_one_thread() -> None:
    """From here on, this process hashes on one thread: it is a fork, or will have some."""
    # The hash's thread pool does not survive a fork: its threads stay behind, and who waits for
    # them waits for ever.
    globals()["_may_use_threads"] = False


os.register_at_fork(after_in_child=use_one_thread)
