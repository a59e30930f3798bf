"""What storing the same bytes costs without ModuleLens: the floor under `repo.add`.

Knows buffers and files only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def write_one(path: Path, data: Sequence[Any]) -> None:
    """All buffers, one after the other, into one file: no digest."""
    with path.open("wb") as file:
        for part in data:
            file.write(part)


def write_blobs(folder: Path, data: Sequence[Any]) -> None:
    """Each different buffer into a file named by its digest, on two threads, the largest first."""
    folder.mkdir()
    waiting, mutex = iter(sorted(data, key=lambda part: -part.nbytes)), threading.Lock()
    seen: set[str] = set()

    def work() -> None:
        while True:
            with mutex:
                part = next(waiting, None)
            if part is None:
                return
            digest = blake3(part).hexdigest()
            with mutex:
                new = digest not in seen
                seen.add(digest)
            if new:
                (folder / digest).write_bytes(part)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        work()
        other.result()


def give_back_pages(folder: Path) -> None:
    """Gives the pages of all files back, but removes none.

    The next round then finds memory that the system has at hand, as a machine does that has run
    for a while. And no file is freed: ext4 looks at every inode that was freed in the last minutes
    before it gives out one, so that a new file takes 20 times as long after many were removed.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            os.truncate(path, 0)
