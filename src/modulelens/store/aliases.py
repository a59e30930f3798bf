"""aliases.json of a collection: names that point at one version and move. Knows no entry."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from modulelens.errors import NotFound, UsageError
from modulelens.records import from_json, to_json
from modulelens.store.files import read_regular, space_for, write_atomic
from modulelens.store.layout import Layout

_VERSION_LIKE = re.compile(r"v?\d+")


class Pointers(msgspec.Struct, frozen=True, omit_defaults=True):
    """What aliases.json holds; `removed` is the highest version ever removed: none comes twice."""

    aliases: dict[str, int] = {}
    removed: int = 0

    def of(self, version: int) -> list[str]:
        """The aliases that point at a version."""
        return sorted(alias for alias, target in self.aliases.items() if target == version)


def read_pointers(layout: Layout, collection: str) -> Pointers:
    """The aliases of a collection; none where there is no file.

    Raises:
        Corrupted: The file cannot be read.
    """
    path = layout.collection(collection) / "aliases.json"
    try:
        return from_json(read_regular(path), Pointers, what=str(path))
    except NotFound:
        return Pointers()


def write_pointers(layout: Layout, collection: str, pointers: Pointers) -> None:
    """Rewrites aliases.json; the caller keeps other writers out.

    Raises:
        DiskFull: No space is left; the old file stays.
    """
    data = to_json(pointers)
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
