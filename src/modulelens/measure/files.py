"""Files that may be edited: what they held when a verdict was formed, and what differs since.

Knows digests and the clock; neither what the files mean nor who reads them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from modulelens.measure.imports import digest_of_file

_POLL_S = 0.01
_QUIET_S = 0.01
#: How long a file may be gone or empty while an editor saves it.
_BACK_S = 0.25
#: A file may be written again within the same tick of its file system's clock, unseen by `stat`.
_TICK_S = 3.0


class Files:
    """Watches files by polling; what counts is their content."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._settled: dict[str, tuple[float, ...]] = {}
        self._unchanged_at = time.time()

    def add(self, paths: Iterable[str]) -> None:
        """Watches these as well, from what they hold now."""
        self.know({path: digest_of_file(path) for path in paths if path not in self._known})

    def know(self, digests: Mapping[str, str]) -> None:
        """From here on, a file that holds something else than its digest here has changed."""
        self._known.update(digests)
        for path in digests:
            self._settled.pop(path, None)

    def changed(self) -> dict[str, str]:
        """Path -> digest as it is now, empty where it is gone, of each file that has changed."""
        start = time.time()
        found = {p: now for p, known in self._known.items() if (now := self._digest(p)) != known}
        if not found:
            self._unchanged_at = start
        return found

    def _digest(self, path: str) -> str:
        try:
            info = Path(path).stat()
        except OSError:
            return ""
        stamp = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        if self._settled.get(path) == stamp:
            return self._known[path]
        digest = digest_of_file(path)
        if digest == self._known[path] and time.time() - info.st_ctime > _TICK_S:
            self._settled[path] = stamp
        return digest

    def wait(self) -> None:
        """Returns when a file has changed."""
        start = time.monotonic()
        while not self.changed():
            # At most a twentieth of a core, however many files there are.
            time.sleep(max(_POLL_S, 20 * (time.monotonic() - start)))
            start = time.monotonic()

    def settled(self) -> tuple[dict[str, str], float]:
        """What has changed once nothing moves any more, and the time of the last save.

        Editors write in steps, or remove a file before they put the new one in its place.
        """
        before, until = self._unchanged_at, time.monotonic() + _BACK_S
        found = self.changed()
        while True:
            time.sleep(_QUIET_S)
            again = self.changed()
            whole = all(map(_holds_text, again)) or time.monotonic() > until
            if again == found and whole:
                return again, min(max(before, *map(_saved_at, again), 0.0), time.time())
            found = again


def _holds_text(path: str) -> bool:
    return Path(path).is_file() and Path(path).stat().st_size > 0


def _saved_at(path: str) -> float:
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0
