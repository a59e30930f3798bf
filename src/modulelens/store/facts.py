"""Metadata -> the flat row that can be searched. Knows no database."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from modulelens.records import Metadata, Structure, TensorSpec, tensor_refs


class Row(msgspec.Struct, frozen=True):
    """The searchable facts of one entry. None means unknown or not applicable.

    `cls` is the class's full path. `bytes` are those of the module's own tensors, `input_*` and
    `output_*` those of the tensors in all calls, without repetition; a shape reads "2x64x512", or
    "scalar". `latency_s` is the measured median (else the profile's forward), `flops` those of the
    forward, `memory_bytes` the profile's peak (else what it saves for the backward). `date` is
    ISO 8601 in UTC. `tables` are embedding tables of which rows were kept: "weight 1024/40000".
    """

    id: str
    name: str
    model: str
    fqn: str
    cls: str
    version: int
    date: str | None = None
    file: str | None = None
    params: int = 0
    bytes: int = 0
    depth: int = 0
    dtypes: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    input_dtype: tuple[str, ...] = ()
    input_shape: tuple[str, ...] = ()
    output_dtype: tuple[str, ...] = ()
    output_shape: tuple[str, ...] = ()
    device: str | None = None
    rank: int = 0
    world: int = 1
    git_commit: str | None = None
    torch: str | None = None
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    grade: str | None = None
    strategy: str | None = None
    reason: str | None = None
    calls: int = 0
    latency_s: float | None = None
    flops: int | None = None
    memory_bytes: int | None = None
    tables: tuple[str, ...] = ()


class Kind(enum.Enum):
    """What a field of `Row` holds."""

    NUMBER = enum.auto()
    TEXT = enum.auto()
    LIST = enum.auto()


def _kind(annotation: str) -> Kind:
    if annotation.startswith("tuple"):
        return Kind.LIST
    return Kind.TEXT if annotation.startswith("str") else Kind.NUMBER


#: Fields that a row and a record have in common, as they are.
_SAME = ("id", "name", "model", "fqn", "cls", "version", "tags")
#: Every field of `Row`.
FIELDS: dict[str, Kind] = {name: _kind(Row.__annotations__[name]) for name in Row.__struct_fields__}

_INT64 = 2**63 - 1


def natural(name: str) -> str:
    """A key that sorts layers.2 before layers.10."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(9), name)


def searched(field: str, value: Any) -> tuple[Any, ...]:
    """The values of a field that a filter compares with; `cls` also by its bare class name."""
    if field == "cls":
        return (value, value.replace(":", ".").rpartition(".")[2])
    if FIELDS[field] is Kind.LIST:
        return tuple(value)
    return () if value is None else (value,)


def row_of(metadata: Metadata, aliases: Sequence[str] = ()) -> Row:
    """The facts of one entry and of the aliases that point at it."""
    inputs = _specs(part for call in metadata.calls for part in (call.args, call.kwargs))
    outputs = _specs(call.output for call in metadata.calls)
    dtypes = [_unique(spec.dtype for spec in specs) for specs in (inputs, outputs)]
    shapes = [_unique(_shape(spec) for spec in specs) for specs in (inputs, outputs)]
    environment, source, grade = metadata.environment, metadata.source, metadata.grade
    return Row(
        **{field: getattr(metadata, field) for field in _SAME},
        date=metadata.created or None,
        file=(source.file if source else "") or None,
        params=_number(metadata.params),
        bytes=_number(metadata.own_bytes),
        depth=_number(metadata.depth),
        dtypes=_unique(chain(*dtypes)),
        shapes=_unique(chain(*shapes)),
        input_dtype=dtypes[0],
        input_shape=shapes[0],
        output_dtype=dtypes[1],
        output_shape=shapes[1],
        device=next((spec.device for spec in inputs + outputs), None),
        rank=_number(environment.rank),
        world=_number(environment.world_size),
        git_commit=environment.git_commit or (source.git_commit if source else "") or None,
        torch=environment.torch or None,
        aliases=tuple(sorted(aliases)),
        grade=grade.level.value if grade else None,
        strategy=(grade.strategy if grade else "") or None,
        reason=(grade.reason if grade else "") or None,
        calls=len(metadata.calls),
        **_measured(metadata),
        tables=tuple(f"{name} {n}/{total}" for name, (n, total) in metadata.table_rows.items()),
    )


def _number(value: int) -> int:
    return max(-_INT64, min(value, _INT64))  # what the index can hold


def _measured(metadata: Metadata) -> dict[str, Any]:
    measurement, profile = metadata.measurement, metadata.profile
    found = {"latency_s": measurement.median_s} if measurement else {}
    if profile is None:
        return found
    memory = profile.saved_bytes if profile.peak_bytes is None else profile.peak_bytes
    counts = {"flops": _number(profile.flops_forward), "memory_bytes": _number(memory)}
    return {"latency_s": profile.forward_s} | found | counts


def _specs(structures: Iterable[Structure]) -> list[TensorSpec]:
    return [ref.spec for structure in structures for ref in tensor_refs(structure)]


def _shape(spec: TensorSpec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
