"""Markers of changes that the index may not know yet, so that it notices those of dead writers.

A writer holds the flock of its marker from before the commit until the index has the new rows.
A marker that can be locked belongs to a writer that died in between: its collection is read
again. Looking costs one listing of a folder that is nearly always empty, not a walk over entries.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from modulelens.store.files import space_for, temporary
from modulelens.store.layout import Layout, is_collection, listing
from modulelens.store.locks import release, try_lock


class Change:
    """One change in progress; `versions` are those whose rows have to be written, so far."""

    def __init__(self) -> None:
        self.versions: set[int] = set()
        self.indexed = False


@contextmanager
def marked(layout: Layout, collection: str) -> Iterator[Change]:
    """Keeps a marker during the block, and beyond it unless the change got `indexed`.

    Raises:
        DiskFull: No space is left for the marker; nothing was changed.
    """
    path, descriptor = _create(layout, collection)
    change = Change()
    try:
        yield change
    finally:
        if change.indexed or not change.versions:
            path.unlink()
        release(descriptor)


def _create(layout: Layout, collection: str) -> tuple[Path, int]:
    while True:
        path = layout.changes / f"{collection}.{temporary(layout.changes).name}"
        with space_for(f"collection {collection}", layout.root, 1):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        release(descriptor)  # a reader took it for a dead writer's


def settle(layout: Layout, refresh: Callable[[str], bool], *, writable: bool) -> None:
    """Refreshes the collections that dead writers left, and removes their markers."""
    for path in listing(layout.changes):
        collection = path.name.partition(".")[0]
        if not is_collection(collection):
            continue
        if not writable:
            refresh(collection)
            continue
        descriptor = try_lock(path)
        if descriptor is None:
            continue
        try:
            if refresh(collection):
                path.unlink(missing_ok=True)
        finally:
            release(descriptor)
