"""The records' version on disk, their canonical JSON, and the upgrades from older versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from modulelens.errors import Corrupted, SchemaTooNew, UsageError
from modulelens.records.metadata import Metadata

SCHEMA = 1

#: `UPGRADES[n]` turns a decoded version n into version n + 1. Only ever appended to.
UPGRADES: list[Callable[[dict[str, Any]], dict[str, Any]]] = []

_FIRST = 1
_encoder = msgspec.json.Encoder()
T = TypeVar("T")


def to_json(record: Any) -> bytes:
    """JSON of a record. Equal records give equal bytes; the order of a dict is kept.

    Raises:
        UsageError: It holds a text that is none: half a surrogate pair.
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object!r:.200} is no text", hint="use another name") from error


def from_json(data: bytes, kind: type[T], *, what: str) -> T:
    """A record from JSON.

    Args:
        data: The JSON text.
        kind: The record's class.
        what: Names the file or blob in the error.

    Raises:
        Corrupted: The text is no JSON, or not of that kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupted(f"{what} cannot be read: {error}", hint="run `modulelens fsck`") from error


def read_metadata(data: bytes, *, what: str) -> Metadata:
    """`metadata.json` of any schema up to today's, upgraded.

    Raises:
        Corrupted: The text is no JSON, or not a metadata record.
        SchemaTooNew: A newer ModuleLens wrote it.
    """
    head = from_json(data, _Head, what=what)
    if head.schema > SCHEMA:
        raise SchemaTooNew(
            f"{what} has schema {head.schema}, this ModuleLens reads up to {SCHEMA}",
            hint="pip install --upgrade modulelens",
        )
    if head.schema < _FIRST:
        raise Corrupted(f"{what} has schema {head.schema}; the first was {_FIRST}")
    if head.schema < SCHEMA:
        raw = from_json(data, dict, what=what)
        for upgrade in UPGRADES[head.schema - _FIRST :]:
            raw = upgrade(raw)
        data = to_json(raw | {"schema": SCHEMA})
    found = from_json(data, Metadata, what=what)
    try:
        to_json(found)
    except (OverflowError, RecursionError) as error:  # a number that no JSON of ours holds
        raise Corrupted(f"{what} cannot be read: {error}", hint="run `modulelens fsck`") from error
    return found


class _Head(msgspec.Struct):
    schema: int
