"""flock on empty files, and the hold that keeps gc away from an add in progress.

A dead process holds no flock, so nothing here ever has to be cleaned up or to time out by guess.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from modulelens.errors import Conflict


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
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


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

    def promise(self, blobs: dict[str, int]) -> None:
        """Blobs that are on the disk now, digest -> size, and wait for their entry."""
        with self._mutex:
            self._unclaimed.update(blobs)
            self.present.update(blobs)

    def settle(self, digests: Iterable[str]) -> None:
        """An entry that refers to these blobs is committed."""
        with self._mutex:
            self._unclaimed.difference_update(digests)

    def give_up(self) -> None:
        """Forgets blobs that wait for an entry: this process is not in an add, or failed in it."""
        with self._mutex:
            self._unclaimed.clear()
            self._release_when_done()

    def _release_when_done(self) -> None:
        if self._descriptor is not None and not self._depth and not self._unclaimed:
            _release(self._descriptor)
            self._descriptor = None
            self.present.clear()
