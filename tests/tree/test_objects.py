"""Objects and parameters come back as they were: shared ones shared, caches empty."""

from __future__ import annotations

import types

import torch

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
