"""Entries on disk: claimed, committed, read, rewritten, removed. Knows no index."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from modulelens.errors import Conflict, Corrupted, ModuleLensError, NotFound
from modulelens.records import Metadata, read_metadata, to_json
from modulelens.store.aliases import (
    Pointers,
    change_pointers,
    collection_lock,
    pointers_or_none,
    read_pointers,
)
from modulelens.store.facts import Row, row_of
from modulelens.store.files import (
    digest_of,
    read_regular,
    space_for,
    stat_regular,
    write_atomic,
    write_new,
)
from modulelens.store.layout import Layout


def commit_entry(layout: Layout, metadata: Metadata, state: memoryview) -> Metadata:
    """Stores an entry as the next free version of its collection; returns it as stored.

    Raises:
        DiskFull: No space is left; nothing of the entry stays.
    """
    needed = len(state) + len(to_json(metadata))
    with space_for(f"entry {metadata.name!r:.200}", layout.root, needed):
        folder = _claim(layout, metadata.collection)
        try:
            stored = msgspec.structs.replace(
                metadata,
                version=int(folder.name),
                state_digest=digest_of(state),
                created=metadata.created or _now(),
            )
            write_new(folder / "state.pt", state)
            # The commit point: before this rename the entry does not exist.
            write_atomic(folder / "metadata.json", to_json(stored), tmp=layout.tmp)
        except BaseException:
            clear_folder(folder)
            raise
    return stored


def _claim(layout: Layout, collection: str) -> Path:
    home = layout.collection(collection)
    home.mkdir(exist_ok=True)
    # In this order: a removal raises `removed` before its folder goes away.
    highest = max(layout.version_folders(collection), default=0)
    number = max(highest, read_pointers(layout, collection).removed) + 1
    while True:
        try:
            (home / str(number)).mkdir()
        except FileExistsError:
            number += 1
        else:
            return home / str(number)


def read_entry(layout: Layout, entry_id: str) -> Metadata:
    """The metadata of one entry.

    Raises:
        NotFound: No such entry.
        Corrupted: Its metadata.json cannot be read, is another entry's, or is a link.
        SchemaTooNew: A newer ModuleLens wrote it.
    """
    path = layout.entry(entry_id) / "metadata.json"
    try:
        data = read_regular(path)
    except NotFound as error:
        raise NotFound(f"no entry {entry_id} in {layout.root}", hint="modulelens ls") from error
    metadata = read_metadata(data, what=f"metadata.json of entry {entry_id}")
    if metadata.id != entry_id:
        raise Corrupted(
            f"{path} is that of entry {metadata.id}", hint="move the folder back, or remove it"
        )
    return metadata


def rewrite_entry(layout: Layout, metadata: Metadata) -> None:
    """Replaces metadata.json of an entry that exists.

    Raises:
        NotFound: No such entry.
        DiskFull: No space is left; the old file stays.
    """
    path = layout.entry(metadata.id) / "metadata.json"
    if not path.exists():
        raise NotFound(f"no entry {metadata.id} in {layout.root}", hint="modulelens ls")
    data = to_json(metadata)
    with space_for(f"entry {metadata.name!r:.200}", layout.root, len(data)):
        write_atomic(path, data, tmp=layout.tmp)


def remove_entry(layout: Layout, entry_id: str, *, force: bool) -> None:
    """Removes an entry and the aliases that point at it; its version never comes back.

    Raises:
        Conflict: There is such an alias, and `force` is False.
    """
    collection, _, text = entry_id.partition("/")
    version = int(text)

    def forget(pointers: Pointers) -> Pointers:
        held = pointers.of(version)
        if held and not force:
            raise Conflict(
                f"entry {entry_id} has the alias {', '.join(held)}",
                hint="move the alias first, or remove with force",
            )
        kept = {alias: to for alias, to in pointers.aliases.items() if to != version}
        return Pointers(kept, max(pointers.removed, version))

    with collection_lock(layout, collection):
        change_pointers(layout, collection, forget)
        clear_folder(layout.entry(entry_id))


def clear_folder(folder: Path) -> int:
    """Removes a version folder, metadata.json first; returns the bytes that this freed."""
    freed = sum(path.lstat().st_size for path in folder.iterdir())
    (folder / "metadata.json").unlink(missing_ok=True)
    shutil.rmtree(folder)
    return freed


def check_blobs(layout: Layout, metadata: Metadata, present: Mapping[str, int]) -> None:
    """Makes sure that an entry about to be stored has all its blobs.

    Args:
        layout: The repo.
        metadata: The entry.
        present: Sizes of blobs that are known to be there, by digest.

    Raises:
        Conflict: A blob is missing, or has another size.
    """
    for digest, size in metadata.blobs.items():
        found = present.get(digest)
        try:
            found = stat_regular(layout.blob(digest)).st_size if found is None else found
        except NotFound as error:
            raise Conflict(
                f"entry {metadata.name!r:.200} needs blob {digest}, which is not there",
                hint="put it first; if a gc came in between, add again",
            ) from error
        if found != size:
            raise Conflict(
                f"entry {metadata.name!r:.200} needs blob {digest} with {size:,} bytes,"
                f" it has {found:,}"
            )


def read_rows(
    layout: Layout, collection: str, versions: Iterable[int] | None = None
) -> dict[int, Row]:
    """Rows of the committed versions of a collection; those that cannot be read are left out."""
    rows = {}
    pointers = pointers_or_none(layout, collection)
    for version in layout.versions(collection) if versions is None else versions:
        try:
            metadata = read_entry(layout, f"{collection}/{version}")
            rows[version] = row_of(metadata, pointers.of(version))
        except (ModuleLensError, msgspec.ValidationError, OSError):
            continue  # fsck names it; one bad entry never hides the others
    return rows


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
