"""Garbage collection: removes blobs that no entry needs, and what dead writers left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from modulelens.errors import ModuleLensError
from modulelens.records import from_json
from modulelens.store.entries import clear_folder
from modulelens.store.files import read_regular
from modulelens.store.layout import DIGEST, Layout, listing


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """What gc did.

    `removed_leftovers` are files and entry folders that dead writers left. While the entries in
    `unreadable` cannot be read, nobody knows their blobs, and no blob is removed.
    """

    removed_blobs: int = 0
    freed_bytes: int = 0
    removed_leftovers: int = 0
    unreadable: tuple[str, ...] = ()


class _Roots(msgspec.Struct):
    blobs: dict[str, int] = {}


def collect(layout: Layout) -> GcReport:
    """Cleans the repo. The caller keeps all writers out: whatever is unfinished is dead."""
    needed: set[str] = set()
    unreadable: list[str] = []
    leftovers = freed = blobs = 0
    for folder in _version_folders(layout):
        path = folder / "metadata.json"
        if not path.exists() and not path.is_symlink():
            freed += clear_folder(folder)
            leftovers += 1
            continue
        try:
            needed.update(from_json(read_regular(path), _Roots, what=str(path)).blobs)
        except ModuleLensError:
            unreadable.append(f"{folder.parent.name}/{folder.name}")
    for path in listing(layout.tmp):
        freed += _unlink(path)
        leftovers += 1
    for path in _blobs(layout) if not unreadable else ():
        if path.name not in needed:
            freed += _unlink(path)
            blobs += 1
    return GcReport(
        removed_blobs=blobs,
        freed_bytes=freed,
        removed_leftovers=leftovers,
        unreadable=tuple(unreadable),
    )


def _version_folders(layout: Layout) -> Iterator[Path]:
    for collection in layout.collections():
        for number in layout.version_folders(collection):
            folder = layout.collection(collection) / str(number)
            if folder.is_dir() and not folder.is_symlink():
                yield folder


def _blobs(layout: Layout) -> Iterator[Path]:
    for shard in listing(layout.blobs):
        if shard.is_dir() and not shard.is_symlink():
            yield from (path for path in shard.iterdir() if DIGEST.fullmatch(path.name))


def _unlink(path: Path) -> int:
    size = path.lstat().st_size
    path.unlink()
    return size
