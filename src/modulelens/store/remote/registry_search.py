"""Rows as W&B metadata and back, filters as far as W&B may evaluate them, and cursors.

Knows no SDK. What is pushed down selects at least what the filter does; hits are looked at again.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from modulelens.errors import Corrupted, UsageError
from modulelens.records import SCHEMA
from modulelens.store.facts import FIELDS, Kind, Row
from modulelens.store.files import digest_of
from modulelens.store.query import Compare, Group, Node
from modulelens.store.remote.seam import Draft, Version

#: What the registry says of a version better than its metadata, which stays as it was logged.
_ELSEWHERE = {"id", "version", "tags", "aliases"}
_TAG = re.compile(r"[-\w]+( +[-\w]+)*", re.ASCII)
#: Beyond it a server that reads numbers as doubles would compare other numbers.
_EXACT = 2**53
_RANGES = {"$lt": "$lt", "$le": "$lte", "$gt": "$gt", "$ge": "$gte"}


def is_native(tag: str) -> bool:
    """Whether W&B can have the tag: without dots, for one."""
    return len(tag) <= 128 and _TAG.fullmatch(tag) is not None


def metadata_of(draft: Draft) -> dict[str, Any]:
    """The facts of a draft as an artifact's metadata: flat, without what is unknown."""
    row = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in msgspec.structs.asdict(draft.row).items()
        if name not in _ELSEWHERE and value is not None and not _is_endless(value)
    }
    head = {"identity": draft.identity, "schema": SCHEMA, "class_name": _class_name(draft.row.cls)}
    run = {"run": draft.run} if draft.run else {}
    return {**row, **head, **run, "tags": list(draft.row.tags)}


def _is_endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)  # no JSON


def _class_name(cls: str) -> str:
    return cls.replace(":", ".").rpartition(".")[2]


def version_of(
    metadata: dict[str, Any], place: str, aliases: Sequence[str], tags: Sequence[str]
) -> Version:
    """A version of a registry.

    Args:
        metadata: That of its artifact.
        place: `entity/project/collection:vN`; W&B counts from 0.
        aliases: Those of the registry's collection.
        tags: Those of the artifact; metadata has the ones that W&B cannot have.

    Raises:
        Corrupted: The metadata is not that of a module.
    """
    collection, _, number = place.rpartition("/")[2].partition(":v")
    kept = [tag for tag in metadata.get("tags") or () if tag in tags or not is_native(str(tag))]
    facts = {name: value for name, value in metadata.items() if name in FIELDS}
    facts |= {
        "id": f"{collection}/{int(number) + 1}",
        "version": int(number) + 1,
        "tags": [*kept, *(tag for tag in tags if tag not in kept)],
        "aliases": sorted(alias for alias in aliases if alias != "latest"),
    }
    try:
        identity = msgspec.convert(metadata.get("identity"), str)
        return Version(identity=identity, row=msgspec.convert(facts, Row), place=place)
    except msgspec.ValidationError as error:
        raise Corrupted(f"{place} has metadata that is no module's: {error}") from error


def pushed(node: Node) -> dict[str, Any] | None:
    """A filter for W&B that selects at least what the node does; None selects all."""
    if isinstance(node, Compare):
        return _pushed_condition(node)
    if not isinstance(node, Group):
        return None  # the opposite of "at least" is "at most"
    parts = [pushed(part) for part in node.parts]
    known = [part for part in parts if part is not None]
    if not known or (node.some and len(known) < len(parts)):
        return None
    return known[0] if len(known) == 1 else {"$or" if node.some else "$and": known}


def _pushed_condition(node: Compare) -> dict[str, Any] | None:
    kind = FIELDS[node.field]
    values = node.value if node.op == "$in" else (node.value,)
    if kind is Kind.LIST or node.field in _ELSEWHERE or not values or not all(map(_plain, values)):
        return None
    if node.op in ("$eq", "$in"):
        condition = {node.op: list(values) if node.op == "$in" else node.value}
    elif kind is Kind.NUMBER and node.op in _RANGES:
        condition = {_RANGES[node.op]: node.value}
    else:
        return None  # texts may be ordered in another way there, and regexes be of another dialect
    names = ("cls", "class_name") if node.field == "cls" else (node.field,)
    parts = [{f"metadata.{name}": condition} for name in names]
    return parts[0] if len(parts) == 1 else {"$or": parts}


def _plain(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and abs(value) < _EXACT)


def key_of(version: Version) -> str:
    """A short name of a version, the same in every process."""
    return digest_of(version.row.id.encode())[:12]


def pause(at: str, seen: Collection[str]) -> str:
    """A cursor: W&B's own, and what came already. Its pages move when somebody inserts."""
    return base64.urlsafe_b64encode(f"{at} {''.join(sorted(seen))}".encode()).decode()


def resume(cursor: str) -> tuple[str, set[str]]:
    """What `pause` was given.

    Raises:
        UsageError: It did not make the cursor.
    """
    if not cursor:
        return "", set()
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
    except ValueError:
        text = ""
    found = re.fullmatch(r"(.*) ((?:[0-9a-f]{12})*)", text, re.DOTALL)
    if found is None:
        raise UsageError(f"{cursor!r:.100} is not a cursor of this search")
    return found[1], set(re.findall(".{12}", found[2]))
