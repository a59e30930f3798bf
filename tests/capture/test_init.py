"""What is remembered of constructor calls: every way a module comes to be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.capture import zoo
from torch import nn

import modulelens as ml
from modulelens.capture.init import init_call, init_record
from modulelens.records import InitCall, TensorRef
from modulelens.tree import Decoder, Importer, spec_of


@pytest.fixture(autouse=True)
def tracked() -> Iterator[None]:
    with ml.track_init():
        yield


def call_of(module: nn.Module) -> InitCall | None:
    return init_call(
        module, lambda t: TensorRef(spec=spec_of(t), group=0), lambda m: {"cls": type(m).__name__}
    )


def arguments(module: nn.Module) -> tuple[Any, Any]:
    call = call_of(module)
    assert call is not None
    decoder = Decoder(lambda ref: ref, Importer(["tests"]), lambda body: body["cls"])  # type: ignore[arg-type,return-value]
    return decoder.decode(call.args), decoder.decode(call.kwargs)


def test_a_constructed_module_has_its_arguments_as_they_were_passed() -> None:
    assert arguments(zoo.KwargsOnly(width=4)) == ([], {"width": 4})
    assert arguments(zoo.StarArguments(4, 6, 4, bias=False)) == ([4, 6, 4], {"bias": False})
    layers = zoo.StarArguments(4, 6, bias=False).layers
    assert arguments(layers[0]) == ([4, 6], {"bias": False})
    assert arguments(layers) == (["Linear"], {})


def test_the_outermost_constructor_counts_not_the_ones_it_calls() -> None:
    class Wider(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width * 2, bias=False)

    assert arguments(Wider(3)) == ([3], {})


def test_a_dataclass_and_a_class_with_its_own_new_keep_their_arguments() -> None:
    assert arguments(zoo.DataclassModule(4, act=torch.tanh)) == ([4], {"act": torch.tanh})
    assert arguments(zoo.OwnNew(4, act=torch.tanh)) == ([4], {"act": torch.tanh})


def test_arguments_that_the_constructor_uses_up_are_kept_as_they_came() -> None:
    config, sizes = {"act": torch.tanh, "limit": 0.5}, [4, 4]
    module = zoo.ConsumesConfig(config, sizes)
    assert (config, sizes) == ({"limit": 0.5}, [])
    config["limit"] = 9.0
    assert arguments(module) == ([{"act": torch.tanh, "limit": 0.5}, [4, 4]], {})


def test_a_tensor_argument_is_kept_by_value() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.scale = scale.mul_(2)

    record = init_record(Scaled(torch.ones(3)))
    assert record is not None
    assert torch.equal(record.tensors[0], torch.ones(3))


def test_a_deepcopy_carries_the_record_of_its_original() -> None:
    original = nn.Dropout(0.25)
    for twin in (copy.deepcopy(original), copy.copy(original)):
        assert arguments(twin) == ([0.25], {})
        assert call_of(twin).how == "copied"  # type: ignore[union-attr]
    assert call_of(original).how == "constructed"  # type: ignore[union-attr]


def test_copies_made_while_constructing_are_no_constructions() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert arguments(encoder.layers[1]) == ([8, 2, 16], {"dropout": 0.3})
    assert arguments(encoder.layers[1].dropout) == ([0.3], {})


def test_an_unpickled_module_has_no_record_and_a_pickle_holds_none() -> None:
    stored = pickle.dumps(nn.Dropout(0.25))
    assert b"modulelens" not in stored.replace(b"_modulelens_init", b"")
    assert call_of(pickle.loads(stored)) is None


def test_a_class_that_changed_since_has_no_record() -> None:
    lazy = nn.LazyLinear(4)
    with torch.no_grad():
        lazy(torch.ones(2, 3))
    assert type(lazy) is nn.Linear
    assert call_of(lazy) is None


def test_a_module_that_refuses_attributes_is_recorded_all_the_same() -> None:
    assert arguments(zoo.StrictAttributes()) == ([], {})


def test_a_constructor_that_raises_raises_and_leaves_nothing() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Fails()


def test_a_module_is_not_kept_alive_by_its_record() -> None:
    import gc
    import weakref

    module = zoo.ModuleAsArgument(nn.Linear(2, 2))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_modules_can_be_built_and_saved_after_tracking_has_ended() -> None:
    outer = ml.track_init()
    inner = ml.track_init()
    inner.stop()
    inner.stop()
    assert call_of(nn.Linear(2, 2)) is not None
    outer.stop()
    plain = zoo.OwnNew(4, torch.tanh)
    assert isinstance(plain, zoo.OwnNew)


def test_without_tracking_there_is_no_record_and_classes_are_as_before() -> None:
    before = zoo.OwnNew.__init__
    with ml.track_init():
        zoo.OwnNew(4, torch.tanh)
    # The fixture's own tracking is still on: wrapped classes are put back when the last one ends.
    assert zoo.OwnNew(4, torch.tanh).layer.in_features == 4
    assert before.__qualname__ == zoo.OwnNew.__init__.__qualname__


def test_state_dicts_and_reprs_are_those_of_an_untracked_module() -> None:
    module = zoo.CalledTwice()
    assert list(module.state_dict()) == ["layer.weight", "layer.bias"]
    assert "modulelens" not in repr(module)
