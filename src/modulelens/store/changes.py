"""One writer at a time, and markers of changes that the index may not know yet.

Who changes entries holds `writer.lock`, and a marker that names the collections from before the
first commit until the index has the new rows. A marker that is there while nobody holds the lock
belongs to a writer that died in between: its collections are read again. Looking costs one listing
of a folder that is nearly always empty, not a walk over entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from modulelens.errors import Conflict
from modulelens.records import Metadata
from modulelens.store.files import space_for, write_new
from modulelens.store.layout import COLLECTION, Layout, listing
from modulelens.store.locks import locked


class Changed:
    """What a writer has changed so far; `records` are those of its entries that are at hand."""

    def __init__(self, collections: Iterable[str]) -> None:
        self.versions: dict[str, set[int]] = {collection: set() for collection in collections}
        self.records: dict[str, Metadata] = {}
        self.indexed = False


@contextmanager
def writing(layout: Layout, collections: Iterable[str]) -> Iterator[Changed]:
    """Keeps other writers out of the block; the marker stays unless the change got `indexed`.

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
                names = marker.read_text(errors="replace").split()
                if refresh(dict.fromkeys(filter(COLLECTION.fullmatch, names))) and writable:
                    marker.unlink()
    except (Conflict, FileNotFoundError):
        return  # a writer is at work, or was just now, and sees to its own
