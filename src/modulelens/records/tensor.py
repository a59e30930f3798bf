"""What is remembered of a tensor: its description, and where its bytes are. No data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from modulelens.errors import Corrupted

#: A number of elements or bytes.
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description of a tensor, in torch's words. Holds no data.

    `shape` and `stride` are in elements; `device` is where it lived when it was captured.
    """

    dtype: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...] = ()
    device: str = "cpu"
    layout: str = "strided"
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


#: The levels at which `ValueStats.quantiles` are taken.
QUANTILE_LEVELS = (
    *(0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0),
)


class ValueStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Values of a tensor whose data was not kept: their statistics, and what holds for them.

    All but `nans` and `infs` are over finite values; all are None or empty for an empty tensor.
    `zeros`, `nans` and `infs` (of minus and plus infinity) are shares between 0 and 1;
    `quantiles`, of the values that are not zero, belong to `QUANTILE_LEVELS`. A row is the last
    dimension: in each, values go in `order` ("ascending", "strictly ascending" or "descending"),
    are a `permutation` of consecutive integers, or sum to 1 (`probabilities`). No row's minimum is
    above `row_low`, no row's maximum below `row_high`. `total` is the sum of non-negative
    integers, `whole` says that all values are integers, `discrete` that few different ones occur.
    """

    min: int | float | None = None
    max: int | float | None = None
    mean: float | None = None
    std: float | None = None
    zeros: float | None = None
    nans: float | None = None
    infs: tuple[float, float] = (0.0, 0.0)
    quantiles: tuple[float, ...] = ()
    order: str = ""
    permutation: bool = False
    probabilities: bool = False
    whole: bool = False
    discrete: bool = False
    total: int | None = None
    row_low: float | None = None
    row_high: float | None = None


class TensorRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `TensorSpec` and where its bytes are.

    Exactly one of `blob` (a digest) and `key` (a key of the entry's `state.pt`) is set; neither
    is when only the shape was kept. `offset` counts elements from the start of those `nbytes`,
    which a blob that is `packed` holds compressed (zlib). With `rows`, those bytes are that many
    rows of a table, and behind them their numbers (int64); the others were not used, and come back
    as zeros.
    Tensors with the same `group` shared memory in the live model; tensors of different groups
    did not, even when their bytes are equal and so share one blob. References with the same
    `object` (not -1) were one tensor object.
    """

    spec: TensorSpec
    group: int
    object: int = -1
    offset: Size = 0
    nbytes: Size = 0
    blob: str | None = None
    key: str | None = None
    packed: bool = False
    rows: int | None = None
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


def all_kept(structure: Structure) -> bool:
    """Whether the bytes of all tensors inside a structure were kept."""
    refs = [*tensor_refs(structure), *tensor_refs(structure, "$parameter")]
    return all(ref.kept or ref.group < 0 for ref in refs)


def tensor_refs(structure: Structure, kind: str = "$tensor") -> list[TensorRef]:
    """All `TensorRef`s inside a structure, in the order in which they were written."""
    return list(map(as_ref, bodies_of(structure, kind)))


def bodies_of(structure: Structure, kind: str) -> Iterator[Any]:
    """What stands under that key anywhere inside a structure, in the order of writing."""
    pending: list[Any] = [structure]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if kind in node:
                yield node[kind]
            pending.extend(reversed(list(node.values())))
        elif isinstance(node, list):
            pending.extend(reversed(node))


def as_ref(value: Any) -> TensorRef:
    """A `TensorRef` from its JSON form; a `TensorRef` is returned as it is.

    Raises:
        Corrupted: The value is not a tensor reference.
    """
    if isinstance(value, TensorRef):
        return value
    try:
        ref = msgspec.convert(value, TensorRef)
    except msgspec.ValidationError as error:
        raise Corrupted(f"a tensor reference cannot be read: {error}") from error
    if ref.spec.stride and len(ref.spec.stride) != len(ref.spec.shape):
        raise Corrupted(f"a tensor reference cannot be read: strides of {ref.spec.shape} expected")
    return ref
