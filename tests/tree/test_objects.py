"""Objects and parameters come back as they were: shared ones shared, caches empty."""

from __future__ import annotations

import collections
import operator
import random
import types

import numpy as np
import pytest
import torch
from tests.tree.values import Point, trip

from modulelens.errors import NotRebuildable
from modulelens.records import TensorRef
from modulelens.tree import Decoder, Encoder, Importer, spec_of


def test_a_parameter_in_two_places_stays_one() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    encoded = Encoder(lambda t: TensorRef(spec=spec_of(t), group=0, object=7)).encode(
        {"weight": parameter, "tied": parameter}
    )
    made = torch.arange(3.0).requires_grad_()
    decoded = [Decoder(lambda _: made, Importer()).decode(encoded) for _ in range(2)]
    assert len({id(p) for d in decoded for p in d.values()}) == 1
    tied = decoded[0]["tied"]
    assert type(tied) is torch.nn.Parameter
    (tied * 2).sum().backward()
    assert tied.grad.tolist() == [2.0, 2.0, 2.0]


class JaggedLike:
    def __init__(self) -> None:
        self.values = [1, 2]
        self._jt_dict = {"a": [1]}


def test_a_filled_cache_is_restored_empty_not_missing() -> None:
    encoded = Encoder(id).encode(JaggedLike())
    made = Decoder(lambda ref: ref, Importer(["tests"])).decode(encoded)
    assert vars(made) == {"values": [1, 2], "_jt_dict": None}


def test_namespaces_come_back_with_their_attributes() -> None:
    value = types.SimpleNamespace(depth=2, inner=types.SimpleNamespace(rate=0.5))
    value.inner.outer = value
    encoder = Encoder(id)
    made = Decoder(lambda ref: ref, Importer()).decode(encoder.encode(value))
    assert not encoder.opaque
    assert type(made) is types.SimpleNamespace
    assert (made.depth, made.inner.rate, made.inner.outer is made) == (2, 0.5, True)


class Counted(collections.defaultdict):  # type: ignore[type-arg]
    pass


def test_default_factories_come_back_also_of_classes_that_extend_the_dict() -> None:
    for value in (collections.defaultdict(list, a=[1]), Counted(int, b=2)):
        made, again = trip([value, value]).value
        assert made is again
        assert type(made) is type(value)
        assert (made, made.default_factory) == (value, value.default_factory)
    assert made["new"] == 0


def test_a_random_source_in_two_places_stays_one() -> None:
    for source in (np.random.default_rng(1), np.random.RandomState(1), random.Random(1)):
        made, again = trip([source, {"same": source}]).value
        assert again["same"] is made
        assert made.random() == source.random()
    generator = torch.Generator().manual_seed(1)
    made, again = trip([generator, generator]).value
    assert again is made


def test_a_value_that_cannot_be_changed_and_holds_itself_is_refused_by_name() -> None:
    inside: list[object] = []
    loop = Point(inside, 1)
    inside.append(loop)
    with pytest.raises(NotRebuildable, match="holds itself"):
        trip(loop)


def test_builtin_functions_are_named_by_where_they_can_be_imported_from() -> None:
    assert trip(operator.add).value is operator.add
    assert trip(1 << 20_000).value == 1 << 20_000


class Bag(set):  # type: ignore[type-arg]
    pass


def test_sets_are_written_in_one_order_however_they_came_about() -> None:
    items = [*map(str, range(20)), -34, 2.5, None, (1, "a")]
    for kind in (set, frozenset, Bag):
        one, other = kind(items), kind(reversed(items))
        assert Encoder(id).encode(one) == Encoder(id).encode(other)
        assert trip(one).value == one
        assert type(trip(one).value) is kind
    point = Point(1, 2)
    assert trip({point, "x", 3}).value == {point, "x", 3}
