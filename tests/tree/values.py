"""Strategies for nested values and tensors, and equality that sees types, bits and sharing."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import types
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from modulelens.capture.snapshot import Snapshots
from modulelens.rebuild import Tensors
from modulelens.records import TensorRef, to_json
from modulelens.tree import Decoder, Encoder, Importer, tensors_of


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    left: Any
    right: Any = None


class Slotted:
    __slots__ = ("one", "two")

    def __init__(self, one: Any) -> None:
        self.one = one


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Config(dict):  # type: ignore[type-arg]
    pass


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
]

numbers = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=5)
)
atoms = st.one_of(
    numbers,
    st.binary(max_size=5),
    st.sampled_from([..., NotImplemented, Colour.RED, Colour.BLUE, Flags.A | Flags.B]),
    st.sampled_from([torch.float8_e4m3fn, torch.device("cpu"), torch.Size([2, 0]), torch.strided]),
    st.sampled_from([torch.channels_last, math.sqrt, torch.relu, dict, Point, np.dtype("f4")]),
    st.sampled_from([slice(1, None, 2), range(3, 9, 2), np.float32(1.5), "$tensor", "\ud800"]),
)
keys = st.one_of(st.text(max_size=4), st.integers(), st.just("$ref"), st.tuples(st.integers()))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, by_text = (
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    )
    by_any = st.dictionaries(keys, inner, max_size=3)
    names = st.dictionaries(st.sampled_from(["a", "b"]), inner)
    return st.one_of(
        lists,
        by_text,
        by_any,
        lists.map(tuple),
        lists.map(collections.deque),
        by_any.map(collections.OrderedDict),
        by_any.map(lambda d: collections.defaultdict(list, d)),
        by_any.map(types.MappingProxyType),
        by_text.map(Config),
        names.map(lambda d: Plain(**d)),
        names.map(lambda d: types.SimpleNamespace(**d)),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Slotted, inner),
        st.sets(st.integers() | st.text(max_size=2), max_size=3),
        st.frozensets(st.integers(), max_size=3),
    )


values = st.recursive(atoms, _containers, max_leaves=12)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Views of one or two storages: any dtype, offset, strides (0 and overlapping ones too)."""
    made = []
    for _ in range(draw(st.integers(1, 2))):
        dtype = draw(st.sampled_from(DTYPES))
        size = draw(st.integers(1, 24))
        raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
        if dtype is torch.bool:
            raw = bytes(b & 1 for b in raw)
        base = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype)
        for _ in range(draw(st.integers(1, 3))):
            made.append(draw(_views(base)))
    return made


@st.composite
def _views(draw: st.DrawFn, base: Tensor) -> Tensor:
    rank = draw(st.integers(0, 3))
    shape = [draw(st.integers(0, 3)) for _ in range(rank)]
    stride = [draw(st.integers(0, 4)) for _ in range(rank)]
    reach = sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True))
    if reach >= base.numel():
        return base
    view = base.as_strided(shape, stride, draw(st.integers(0, base.numel() - 1 - reach)))
    if view.is_complex() and draw(st.booleans()):
        view = view.conj()
    if base.is_floating_point() and draw(st.booleans()):
        view = view.detach().requires_grad_()
    return view


@dataclasses.dataclass
class Trip:
    """A value through encoder, JSON text and decoder."""

    value: Any
    json: bytes
    opaque: list[str]


def trip(value: Any, **decoder: Any) -> Trip:
    snapshots = Snapshots()
    encoder = Encoder(snapshots.ref)
    json = to_json(encoder.encode(value))

    def storage(ref: TensorRef) -> torch.UntypedStorage:
        return snapshots.taken[int((ref.key or "")[1:])].data.clone()

    made = Decoder(Tensors(storage).get, Importer(["tests"]), **decoder).decode(
        msgspec.json.decode(json)
    )
    return Trip(made, json, encoder.opaque)


def equal(left: Any, right: Any) -> bool:
    """Same types, same values (NaN equals NaN), same order of dicts."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return equal_tensors(left, right)
    if isinstance(left, (float, complex)):
        return repr(left) == repr(right)
    if isinstance(left, types.MappingProxyType):
        return equal(dict(left), dict(right))
    if isinstance(left, dict):
        same = equal(list(left), list(right)) and equal(list(left.values()), list(right.values()))
        return same and getattr(left, "default_factory", 0) == getattr(right, "default_factory", 0)
    if isinstance(left, (list, tuple, collections.deque)) and not isinstance(left, torch.Size):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, Slotted):
        return equal(left.one, right.one) and not hasattr(right, "two")
    if isinstance(left, (Plain, Record, types.SimpleNamespace)):
        return equal(vars(left), vars(right))
    return bool(left == right)


def equal_tensors(left: Tensor, right: Tensor) -> bool:
    """Same description, strides and flags included, and the same bits."""
    if (left.dtype, left.layout) != (right.dtype, right.layout):
        return False
    if left.requires_grad != right.requires_grad or left.is_conj() != right.is_conj():
        return False
    if left.layout is not torch.strided or left.is_quantized or left.is_nested:
        return all(map(equal_tensors, tensors_of([left]), tensors_of([right])))
    return (left.shape, left.stride()) == (right.shape, right.stride()) and bits(left) == bits(
        right
    )


def bits(tensor: Tensor) -> list[int]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return flat.view(torch.uint8).tolist() if tensor.numel() else []  # type: ignore[no-any-return]
