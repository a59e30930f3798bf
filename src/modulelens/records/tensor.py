"""What is remembered of a tensor: its description, and where its bytes are. No data."""

from __future__ import annotations

from typing import Any

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description of a tensor, in torch's words. Holds no data.

    `shape` and `stride` are in elements; `device` is where it lived when it was captured.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    device: str = "cpu"
    layout: str = "strided"
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class ValueStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Value statistics of a tensor whose data was not kept. NaN is left out of all but `nans`.

    `zeros` and `nans` are shares between 0 and 1. All are None for an empty tensor.
    """

    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    zeros: float | None = None
    nans: float | None = None
    unique: int | None = None


class TensorRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `TensorSpec` and where its bytes are.

    Exactly one of `blob` (a digest) and `key` (a key of the entry's `state.pt`) is set; neither
    is when only the shape was kept. `offset` counts elements from the start of those bytes.
    Tensors with the same `group` shared memory in the live model; tensors of different groups
    did not, even when their bytes are equal and so share one blob. References with the same
    `object` (not -1) were one tensor object.
    """

    spec: TensorSpec
    group: int
    object: int = -1
    offset: int = 0
    nbytes: int = 0
    blob: str | None = None
    key: str | None = None
    leaf: bool = True
    conj: bool = False
    neg: bool = False
    stats: ValueStats | None = None

    @property
    def kept(self) -> bool:
        """Whether the bytes were kept."""
        return self.blob is not None or self.key is not None


#: A value as closed JSON grammar, written and read by `modulelens.tree`.
Structure = Any


def tensor_refs(structure: Structure) -> list[TensorRef]:
    """All `TensorRef`s inside a structure, in the order in which they were written."""
    found: list[TensorRef] = []
    pending: list[Any] = [structure]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if "$tensor" in node:
                found.append(as_ref(node["$tensor"]))
            pending.extend(reversed(list(node.values())))
        elif isinstance(node, list):
            pending.extend(reversed(node))
    return found


def as_ref(value: Any) -> TensorRef:
    """A `TensorRef` from its JSON form; a `TensorRef` is returned as it is.

    Raises:
        msgspec.ValidationError: The value is not a tensor reference.
    """
    return value if isinstance(value, TensorRef) else msgspec.convert(value, TensorRef)
