"""What a collection's folder holds: its entries, and the aliases that point at them.

Knows no index. Who changes anything here keeps all other writers out.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import msgspec

from modulelens.errors import Conflict, Corrupted, ModuleLensError, NotFound, UsageError
from modulelens.records import Metadata, from_json, read_metadata, to_json
from modulelens.store.facts import Row, row_of
from modulelens.store.files import (
    digest_of,
    read_regular,
    size_of,
    space_for,
    write_atomic,
    write_new,
)
from modulelens.store.layout import Layout, is_folder

MOST_VERSIONS = 999_999_999
_VERSION_LIKE = re.compile(r"v?\d+")
_SEAL = b',"digest":"%b"}'
_SEAL_BYTES = len(_SEAL % (b"0" * 64))


def commit_entry(
    layout: Layout, metadata: Metadata, state: bytes | memoryview, number: int | None = None
) -> Metadata:
    """Stores an entry, as the next free version where no number is given; returns it as stored.

    Raises:
        Conflict: The number is taken.
        DiskFull: No space is left; nothing of the entry stays.
    """
    collection = metadata.collection
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    stored = msgspec.structs.replace(
        metadata,
        version=number or _next_version(layout, collection),
        state_digest=digest_of(state),
        created=metadata.created or now,
    )
    data = _sealed(stored)
    folder = layout.collection(collection) / str(stored.version)
    with space_for(f"entry {metadata.name!r:.200}", layout.root, len(state) + len(data)):
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            raise Conflict(
                f"{metadata.name!r:.200} has a version {stored.version} already"
            ) from error
        try:
            write_new(folder / "state.pt", state)
            # The commit point: before this rename the entry does not exist.
            write_atomic(folder / "metadata.json", data, tmp=layout.tmp)
        except BaseException:
            discard(folder)
            raise
    return stored


def _next_version(layout: Layout, collection: str) -> int:
    if not layout.collection(collection).exists():
        return 1
    removed = read_pointers(layout, collection).removed
    highest = max(removed, *layout.version_folders(collection), 0)
    if highest >= MOST_VERSIONS:
        raise Conflict(
            f"collection {collection} has no version left after {highest}",
            hint="trace under another model name",
        )
    return highest + 1


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
    what = f"metadata.json of entry {entry_id}"
    metadata = read_metadata(unsealed(data, what=what), what=what)
    if metadata.id != entry_id:
        raise Corrupted(
            f"{path} is that of entry {metadata.id}", hint="move the folder back, or remove it"
        )
    return metadata


def _sealed(record: Metadata | Pointers) -> bytes:
    """Its JSON, with the digest of all bytes before it as the last field."""
    data = to_json(record)[:-1]
    return data + _SEAL % digest_of(data).encode()


def unsealed(data: bytes, *, what: str) -> bytes:
    """The JSON of a record, the same that was written.

    A file that does not end in a seal was written by other means, and is taken as it is.

    Raises:
        Corrupted: The bytes differ from the digest at their end.
    """
    body, end = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if end[:11] == _SEAL[:11] and end != _SEAL % digest_of(body).encode():
        raise Corrupted(
            f"{what} is corrupted: its bytes differ from the digest at its end",
            hint="remove the entry and add it again; the others are not touched",
        )
    return data


def rewrite_entry(layout: Layout, metadata: Metadata) -> None:
    """Replaces metadata.json of an entry that exists.

    Raises:
        DiskFull: No space is left; the old file stays.
    """
    data = _sealed(metadata)
    with space_for(f"entry {metadata.name!r:.200}", layout.root, len(data)):
        write_atomic(layout.entry(metadata.id) / "metadata.json", data, tmp=layout.tmp)


def remove_entry(layout: Layout, entry_id: str, *, force: bool) -> None:
    """Removes an entry and the aliases that point at it; its version never comes back.

    Raises:
        Conflict: There is such an alias, and `force` is False.
    """
    collection, _, version = entry_id.partition("/")
    pointers = read_pointers(layout, collection)
    held = pointers.of(int(version))
    if held and not force:
        raise Conflict(
            f"entry {entry_id} has the alias {', '.join(held)}",
            hint="move the alias first, or remove with force",
        )
    kept = {alias: to for alias, to in pointers.aliases.items() if alias not in held}
    write_pointers(layout, collection, Pointers(kept, max(pointers.removed, int(version))))
    discard(layout.entry(entry_id))


def discard(path: Path) -> int:
    """Removes a file, or a folder with its metadata.json first; returns the bytes it freed."""
    if not is_folder(path):
        freed = path.lstat().st_size
        path.unlink()
        return freed
    inside = sorted(path.iterdir(), key=lambda part: part.name != "metadata.json")
    freed = sum(map(discard, inside))
    path.rmdir()
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
        found = present[digest] if digest in present else size_of(layout.blob(digest))
        if found != size:
            why = "which is not there" if found is None else f"which has {found:,}"
            raise Conflict(
                f"entry {metadata.name!r:.200} needs blob {digest} with {size:,} bytes, {why}",
                hint="put it first; if a gc came in between, add again",
            )


Version = Annotated[int, msgspec.Meta(ge=0, le=MOST_VERSIONS)]


class Pointers(msgspec.Struct, frozen=True):
    """What aliases.json holds; `removed` is the highest version ever removed: none comes twice."""

    aliases: dict[str, Version] = {}
    removed: Version = 0

    def of(self, version: int) -> list[str]:
        """The aliases that point at a version."""
        return sorted(alias for alias, target in self.aliases.items() if target == version)


def read_pointers(layout: Layout, collection: str) -> Pointers:
    """The aliases of a collection; none where there is no file.

    Raises:
        Corrupted: The file cannot be read.
    """
    path = layout.collection(collection) / "aliases.json"
    if not os.path.lexists(path):
        return Pointers()
    try:
        return from_json(unsealed(read_regular(path), what=str(path)), Pointers, what=str(path))
    except NotFound:
        return Pointers()


def write_pointers(layout: Layout, collection: str, pointers: Pointers) -> None:
    """Rewrites aliases.json; the caller keeps other writers out.

    Raises:
        DiskFull: No space is left; the old file stays.
    """
    data = _sealed(pointers)
    with space_for(f"aliases of collection {collection}", layout.root, len(data)):
        write_atomic(layout.collection(collection) / "aliases.json", data, tmp=layout.tmp)


def point(layout: Layout, collection: str, names: Sequence[str], version: int) -> set[int]:
    """Lets aliases point at a version; returns the versions that gained or lost one.

    Raises:
        DiskFull: No space is left; the aliases stay where they were.
    """
    if not names:
        return {version}
    old = read_pointers(layout, collection)
    aliases = old.aliases | dict.fromkeys(names, version)
    write_pointers(layout, collection, Pointers(aliases, old.removed))
    return {version, *(old.aliases[name] for name in names if name in old.aliases)}


def check_alias(alias: str) -> None:
    """Refuses what could not be told from a version, or could not follow an `@`.

    Raises:
        UsageError: The alias cannot be used.
    """
    if not alias or "@" in alias or _VERSION_LIKE.fullmatch(alias):
        raise UsageError(
            f"{alias!r:.100} cannot be an alias",
            hint="a name such as 'baseline': not empty, no '@', not like a version ('v2')",
        )


def read_rows(
    layout: Layout,
    collection: str,
    versions: Iterable[int] | None = None,
    known: Mapping[str, Metadata] | None = None,
) -> dict[int, Row]:
    """Rows of the committed versions of a collection; a warning names those that have none.

    `known` are records that need not be read, by id.
    """
    rows = {}
    try:
        pointers = read_pointers(layout, collection)
    except Corrupted:
        pointers = Pointers()
    for version in layout.versions(collection) if versions is None else versions:
        entry_id = f"{collection}/{version}"
        try:
            metadata = (known or {}).get(entry_id) or read_entry(layout, entry_id)
            rows[version] = row_of(metadata, pointers.of(version))
        except NotFound:
            continue  # removed meanwhile
        except (ModuleLensError, OSError) as error:  # one bad entry never hides the others
            why = error.message if isinstance(error, ModuleLensError) else str(error)
            warnings.warn(f"entry {entry_id} is left out of the index: {why}", stacklevel=2)
    return rows
