"""A value survives encoder, JSON text and decoder: types, bits, strides, order and sharing."""

from __future__ import annotations

import collections
import functools
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tree.values import Plain, Point, Slotted, equal, equal_tensors, tensors, trip, values
from torch import Tensor, nn

from modulelens.errors import NotRebuildable
from modulelens.tree import Opaque, flatten


@given(values)
@settings(max_examples=300, deadline=None)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    found = trip(value)
    assert not found.opaque
    assert equal(found.value, value)


@given(values, st.data())
@settings(max_examples=50, deadline=None)
def test_an_object_met_twice_is_one_object_again(value: Any, data: st.DataObject) -> None:
    shared = [value]
    twice, again = trip([shared, {"x": (shared,)}]).value
    assert again["x"][0] is twice
    assert equal(twice, shared)


@given(tensors())
@settings(max_examples=200, deadline=None)
def test_tensors_come_back_with_their_strides_and_their_shared_memory(made: list[Tensor]) -> None:
    back = trip(made).value
    assert all(map(equal_tensors, made, back))
    live = [t.untyped_storage()._cdata for t in made]
    again = [t.untyped_storage()._cdata for t in back]
    assert [live.index(s) for s in live] == [again.index(s) for s in again]
    for i, tensor in enumerate(made):
        twins = [j for j, other in enumerate(made) if other is tensor]
        assert all(back[i] is back[j] for j in twins)


@given(tensors())
@settings(max_examples=50, deadline=None)
def test_flattening_gives_each_tensor_once_and_a_path_that_finds_it(made: list[Tensor]) -> None:
    value = {"a": made, "b": Point((made[0],), Plain(inner=made[-1]))}
    flat = flatten(value)
    assert len(flat.tensors) == len({id(t) for t in made})
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        assert eval(f"value{path}", {"value": value}) is tensor


def test_a_list_that_holds_itself() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    back = trip(loop).value
    assert back[1]["again"] is back
    knot = Plain()
    knot.me = [knot]
    back = trip(knot).value
    assert back.me[0] is back


def test_names_of_attributes_and_keys_are_data() -> None:
    odd = {"$tensor": 1, "": 2, "a.b": 3, "\N{SNOWMAN}": 4, "\ud800": 5}
    assert equal(trip(odd).value, odd)
    del odd["\ud800"]
    assert equal(trip(Plain(**odd)).value, Plain(**odd))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 2, torch.quint8),
        lambda: torch.quantize_per_channel(
            torch.rand(2, 3), torch.rand(2).double(), torch.tensor([0, 1]), 0, torch.qint8
        ),
        lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)]),
        lambda: torch.nested.nested_tensor(
            [torch.rand(2, 3), torch.rand(1, 3)], layout=torch.jagged
        ),
        lambda: torch.rand(2, 2).to_mkldnn(),
        lambda: torch.rand(3, dtype=torch.complex64).conj().imag,  # the negative bit
        lambda: nn.Parameter(torch.rand(2), requires_grad=False),
        lambda: nn.Buffer(torch.rand(2)),
        lambda: torch.empty(2, 3, device="meta"),
        lambda: torch.rand(0, 3),
        lambda: torch.tensor(3.0),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecat).*")
def test_special_tensors(make: Any) -> None:
    value = make()
    back = trip(value).value
    assert type(back) is type(value)
    if value.is_mkldnn:
        value, back = value.to_dense(), back.to_dense()
    assert value.is_meta or equal_tensors(value, back)
    if value.layout is torch.sparse_coo:
        assert back.is_coalesced() == value.is_coalesced()


def test_parameters_keep_the_attributes_that_users_hang_on_them() -> None:
    parameter = nn.Parameter(torch.rand(2))
    parameter.group, parameter.rates = "slow", [0.1]  # type: ignore[attr-defined]
    back, again = trip([parameter, parameter]).value
    assert type(back) is nn.Parameter
    assert (back.group, back.rates) == ("slow", [0.1])
    assert again is back


def test_random_sources_go_on_where_they_were() -> None:
    sources = [
        torch.Generator().manual_seed(3),
        np.random.default_rng(3),
        np.random.RandomState(3),
        random.Random(3),
    ]
    back = trip(sources).value
    assert torch.equal(torch.rand(2, generator=sources[0]), torch.rand(2, generator=back[0]))
    assert [s.random() for s in sources[1:]] == [s.random() for s in back[1:]]


@pytest.mark.parametrize("dtype", ["f4", ">i2", "M8[ns]", "?", "U3", "c8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_numpy_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.ones(shape).astype(dtype)
    back, again = trip([value, value]).value
    assert back is again
    assert back.dtype == value.dtype
    assert np.array_equal(back, value)
    assert back.flags.writeable


def test_callables_are_kept_by_name() -> None:
    kept = [functools.partial(torch.add, alpha=2), torch.relu, "a".upper, Plain(x=1).__eq__, np.exp]
    back = trip(kept).value
    assert equal(back[0](torch.ones(1), 1), torch.tensor([3.0]))
    assert back[1] is torch.relu
    assert back[2]() == "A"
    assert back[4] is np.exp


def test_weak_references_locks_and_handles() -> None:
    import threading

    target = Plain(x=1)
    layer = nn.Linear(1, 1)
    value = [target, weakref.ref(target), threading.Lock(), layer.register_forward_hook(print)]
    back = trip(value).value
    assert back[1]() is back[0]
    assert back[2].acquire(blocking=False)
    assert back[3] is None


def local_object() -> Any:
    class Here:
        pass

    return Here()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (iter([1]), "list_iterator"),
        ((x for x in "ab"), "generator"),
        (local_object(), "Here"),
        (np.array([object()]), "numpy array"),
        (nn.Linear(1, 1), "module"),
        (collections.Counter, ""),
    ],
)
def test_what_has_no_rule_is_named_and_stays_in_its_place(value: Any, named: str) -> None:
    found = trip({"kept": 1, "odd": [value]})
    if not named:
        assert found.value["odd"] == [value]
        return
    odd = found.value["odd"][0]
    assert isinstance(odd, Opaque)
    assert named in found.opaque[0]
    assert named in repr(odd)
    assert found.value["kept"] == 1
    assert flatten(odd).opaque == found.opaque
    with pytest.raises(NotRebuildable, match="an argument holds"):
        trip([value], strict="an argument")


def test_depth_and_size_have_an_end() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    assert "too deep" in trip(deep).opaque[0]
    assert "too large" in trip([[0] for _ in range(250_000)]).opaque[0]


def test_objects_are_made_without_running_any_code_of_theirs() -> None:
    back = trip(Loud(3)).value
    assert type(back) is Loud
    assert back.made == 3


class Loud(Slotted):
    """Whatever Python calls on copying or loading raises."""

    def __new__(cls, *args: int) -> Loud:
        assert args, "made without arguments"
        return super().__new__(cls)

    def __init__(self, made: int) -> None:
        self.made = made

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise RuntimeError(name)
        object.__setattr__(self, name, value)

    def __reduce__(self) -> Any:
        raise RuntimeError("reduced")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("state set")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]
