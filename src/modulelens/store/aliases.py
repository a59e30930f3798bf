"""aliases.json of a collection: names that point at one version and move. Knows no entry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from modulelens.errors import Corrupted, NotFound, UsageError
from modulelens.records import from_json, to_json
from modulelens.store.files import read_regular, space_for, write_atomic
from modulelens.store.layout import Layout
from modulelens.store.locks import locked

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


def pointers_or_none(layout: Layout, collection: str) -> Pointers:
    """The same, but none where the file is damaged: search shows the entries without aliases."""
    try:
        return read_pointers(layout, collection)
    except Corrupted:
        return Pointers()


@contextmanager
def collection_lock(layout: Layout, collection: str) -> Iterator[None]:
    """Only one process at a time changes what a collection already holds."""
    with locked(layout.collection(collection) / "lock"):
        yield


def change_pointers(
    layout: Layout, collection: str, change: Callable[[Pointers], Pointers]
) -> Pointers:
    """Rewrites aliases.json under `collection_lock`, which the caller holds; returns the old.

    Raises:
        DiskFull: No space is left; the old file stays.
    """
    before = read_pointers(layout, collection)
    after = change(before)
    data = to_json(after)
    if after != before:
        path = layout.collection(collection) / "aliases.json"
        with space_for(f"aliases of collection {collection}", layout.root, len(data)):
            write_atomic(path, data, tmp=layout.tmp)
    return before


def point(layout: Layout, collection: str, names: Sequence[str], version: int) -> set[int]:
    """Lets aliases point at a version; returns the versions that gained or lost one.

    Raises:
        DiskFull: No space is left; the aliases stay where they were.
    """
    new = dict.fromkeys(names, version)
    with collection_lock(layout, collection):
        before = change_pointers(
            layout, collection, lambda old: Pointers({**old.aliases, **new}, old.removed)
        )
    return {version, *(before.aliases[name] for name in names if name in before.aliases)}


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
