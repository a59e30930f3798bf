"""What people and agents write for an entry -> its id."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from modulelens.errors import NotFound, UsageError
from modulelens.records import collection_id
from modulelens.store.entries import read_pointers
from modulelens.store.layout import COLLECTION, Layout

_VERSION = re.compile(r"v?([1-9][0-9]{0,8})")

T = TypeVar("T")
#: Names of collections that contain a text.
Names = Callable[[str], Sequence[str]]


def resolve(layout: Layout, ref: str, names: Names) -> str:
    """The id of the entry that `ref` means; the newest version where it says none.

    Args:
        layout: The repo.
        ref: `model/fqn`, `model` (its root module) or a collection id, each alone or with `@v2`
            or `@alias`; or an entry id.
        names: Asked for suggestions when nothing fits.

    Raises:
        NotFound: No such collection, version or alias.
        UsageError: `ref` is no text.
    """
    if not isinstance(ref, str):
        raise UsageError(f"{ref!r:.100}: a reference is text, such as 'model/fqn'")
    head, _, tail = ref.rpartition("/")
    if COLLECTION.fullmatch(head) and tail in map(str, layout.versions(head)):
        return ref
    # The whole of it first: a name may contain an "@".
    name, mark, suffix = ref, "", ""
    collection = _collection(layout, name)
    if collection is None and "@" in ref:
        name, mark, suffix = ref.rpartition("@")
        collection = _collection(layout, name)
    if collection is None:
        raise NotFound(
            f"no entry {ref!r:.300} in {layout.root}",
            hint="`modulelens ls` lists what is there",
            did_you_mean=_suggestions(name, names),
        )
    version = _version(layout, collection, suffix, name) if mark else None
    return f"{collection}/{version or layout.versions(collection)[0]}"


def resolve_at(ref: str, get: Callable[[str, str], T], names: Names, where: str) -> T:
    """As `resolve`, at a place that is asked by collection, and version or alias.

    Args:
        ref: As for `resolve`.
        get: Gives what is there, or raises NotFound; the newest for "".
        names: Asked for suggestions when nothing fits.
        where: Names the place in the error.

    Raises:
        NotFound: Nothing fits.
        UsageError: `ref` is no text.
    """
    if not isinstance(ref, str):
        raise UsageError(f"{ref!r:.100}: a reference is text, such as 'model/fqn'")
    head, _, tail = ref.rpartition("/")
    if COLLECTION.fullmatch(head) and tail.isdecimal():
        return get(head, tail)
    name, mark, suffix = ref.rpartition("@")
    asked = [(found, "") for found in _candidates(ref)]  # a name may contain an "@"
    asked += [(found, suffix) for found in _candidates(name)] if mark and suffix else []
    hint = "`modulelens find --remote` lists what is there"
    for collection, which in asked:
        try:
            return get(collection, which)
        except NotFound as error:
            hint = error.hint if which and "versions there: v" in error.hint else hint
    raise NotFound(
        f"no entry {ref!r:.300} in {where}",
        hint=hint,
        did_you_mean=_suggestions(name if mark else ref, names),
    )


def _candidates(name: str) -> list[str]:
    model, _, fqn = name.partition("/")
    itself = [name] if COLLECTION.fullmatch(name) else []
    return list(dict.fromkeys([*itself, collection_id(model, fqn), collection_id(name, "")]))


def _collection(layout: Layout, name: str) -> str | None:
    return next((found for found in _candidates(name) if layout.versions(found)), None)


def _version(layout: Layout, collection: str, suffix: str, name: str) -> int:
    versions = layout.versions(collection)
    number = _VERSION.fullmatch(suffix)
    if number and int(number[1]) in versions:
        return int(number[1])
    aliases = read_pointers(layout, collection).aliases
    if not number and aliases.get(suffix) in versions:
        return aliases[suffix]
    from difflib import get_close_matches

    shown = ", ".join(f"v{version}" for version in versions[:5])
    raise NotFound(
        f"{name!r:.300} has no version or alias {suffix!r:.100}",
        hint=f"it has {len(versions)} versions ({shown}) and {len(aliases)} aliases",
        did_you_mean=get_close_matches(suffix, aliases, n=3),
    )


def _suggestions(ref: str, names: Names) -> list[str]:
    from difflib import get_close_matches

    containing = list(names(ref)[:3]) if ref else []
    pool = names(f"{ref.partition('/')[0]}/") or names("")
    return list(dict.fromkeys(get_close_matches(ref, pool, n=3) + containing))[:3]
