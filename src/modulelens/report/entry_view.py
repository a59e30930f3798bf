"""The part of an entry's record that a reader wants first, bounded in size. Lays nothing out."""

from __future__ import annotations

import msgspec

from modulelens.errors import NotFound
from modulelens.records import Call, Grade, Metadata, Structure, TensorRef
from modulelens.report.structure import (
    call_leaves,
    is_contiguous,
    leaves,
    shown_text,
    signature,
    value,
)
from modulelens.report.table import clean, shorten

_MOST_CALLS = 2
_MOST_TENSORS = 12
_MOST_WARNINGS = 5
_LONGEST_TEXT = 400


class TensorView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of a call. `kept` is False where only its shape is known."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contiguous: bool
    device: str
    requires_grad: bool = False
    kept: bool = True


class CallView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call: its signature as text, and its first tensors (`tensors` counts all of them).

    The signature begins with the method's name where it was not `forward`. `notes` say what was
    not kept or is not compared.
    `gradients` names those that were kept, by the number of the leaf.
    """

    index: int
    signature: str
    output: str
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    tensors: int
    mutated: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class EntryView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry. `init` and the calls are text to read; the whole record is `metadata.json`."""

    id: str
    name: str
    model: str
    fqn: str
    version: int
    cls: str
    created: str
    step: int
    params: int
    own_bytes: int
    init: str
    source: str
    git_commit: str
    torch: str
    python: str
    devices: tuple[str, ...]
    calls: tuple[CallView, ...]
    calls_kept: int
    calls_dropped: int = 0
    recomputes: int = 0
    rank: int = 0
    world_size: int = 1
    grade: Grade | None = None
    ties: dict[str, tuple[str, ...]] = {}
    table_rows: dict[str, tuple[int, int]] = {}
    tags: tuple[str, ...] = ()
    median_s: float | None = None
    forward_s: float | None = None
    flops_forward: int | None = None
    warnings: tuple[str, ...] = ()


def entry_view(metadata: Metadata, *, call: int | None = None) -> EntryView:
    """The view of an entry with its first calls, or with the one call asked for.

    Raises:
        NotFound: The entry has no such call.
    """
    env, source = metadata.environment, metadata.source
    measured, profile = metadata.measurement, metadata.profile
    return EntryView(
        id=metadata.id,
        name=metadata.name,
        model=metadata.model,
        fqn=metadata.fqn,
        version=metadata.version,
        cls=metadata.cls,
        created=metadata.created,
        step=metadata.step,
        params=metadata.params,
        own_bytes=metadata.own_bytes,
        init=_init(metadata),
        source="" if source is None else f"{source.file or source.path}:{source.line}",
        git_commit=env.git_commit + (" with changes" if env.git_dirty else ""),
        torch=env.torch,
        python=env.python,
        devices=env.devices,
        rank=env.rank,
        world_size=env.world_size,
        calls=tuple(map(_call_view, _chosen(metadata, call))),
        calls_kept=len(metadata.calls),
        calls_dropped=metadata.dropped_calls,
        recomputes=metadata.recomputes,
        grade=metadata.grade,
        ties=metadata.ties,
        table_rows=metadata.table_rows,
        tags=metadata.tags,
        median_s=measured.median_s if measured else None,
        forward_s=profile.forward_s if profile else None,
        flops_forward=profile.flops_forward if profile else None,
        warnings=tuple(shorten(text, _LONGEST_TEXT) for text in metadata.warnings[:_MOST_WARNINGS]),
    )


def _chosen(metadata: Metadata, call: int | None) -> tuple[Call, ...]:
    if call is None:
        return metadata.calls[:_MOST_CALLS]
    found = tuple(c for c in metadata.calls if c.index == call)
    if not found:
        kept = ", ".join(str(c.index) for c in metadata.calls[:20]) or "none"
        raise NotFound(f"{metadata.name}@v{metadata.version} has no call {call}; kept are: {kept}")
    return found


def init_text(metadata: Metadata) -> str:
    """The constructor call as it would be written, empty where none was seen."""
    init = metadata.init
    if init is None:
        return ""
    return clean(init.cls).replace(":", ".").rsplit(".", 1)[-1] + signature(init.args, init.kwargs)


def _init(metadata: Metadata) -> str:
    copied = metadata.init is not None and metadata.init.how != "constructed"
    return shorten(init_text(metadata), _LONGEST_TEXT) + (" (copied)" if copied else "")


def _call_view(call: Call) -> CallView:
    into = call_leaves(call.args, call.kwargs)
    out = leaves(call.output, "output")
    method = "" if call.method == "forward" else shown_text(call.method)
    return CallView(
        index=call.index,
        signature=shorten(method + signature(call.args, call.kwargs), _LONGEST_TEXT),
        output=shorten(value(call.output), _LONGEST_TEXT),
        inputs=_tensors(into),
        outputs=_tensors(out),
        tensors=len(into) + len(out),
        mutated=call.mutated[:_MOST_TENSORS],
        gradients=_gradients(call.grad_output, call.grad_input),
        notes=tuple(shorten(clean(text), _LONGEST_TEXT) for text in call.notes[:4]),
    )


def _gradients(outputs: dict[str, Structure], inputs: dict[str, Structure]) -> tuple[str, ...]:
    named = [f"output {leaf}" for leaf in outputs] + [f"input {leaf}" for leaf in inputs]
    return tuple(named[:_MOST_TENSORS])


def _tensors(found: list[tuple[str, TensorRef]]) -> tuple[TensorView, ...]:
    return tuple(
        TensorView(
            path=path,
            dtype=ref.spec.dtype,
            shape=ref.spec.shape,
            stride=ref.spec.stride,
            contiguous=is_contiguous(ref.spec),
            device=ref.spec.device,
            requires_grad=ref.spec.requires_grad,
            kept=ref.kept,
        )
        for path, ref in found[:_MOST_TENSORS]
    )
