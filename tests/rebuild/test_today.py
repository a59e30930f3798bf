"""What today's code says wins over what was captured: an edit is never hidden by old state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modulelens as ml


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.act: nn.Module = nn.ReLU()
        self.norm = nn.LayerNorm(width)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.lin(x))) * self.scale


class OtherChild(Block):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.act = nn.GELU()


class OtherOption(Block):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.norm.eps = 0.1


class OtherAttribute(Block):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.scale = 0.25


class NoBias(Block):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.lin = nn.Linear(width, width, bias=False)


class OtherNames(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * 0.5


class SameOtherwise(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.lin(x))) * self.scale


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ml.Entry]:
    with ml.track_init():
        block = Block()
    with ml.trace(block, name="block", modules="", keep=ml.Keep(grads=True)) as trace:
        block(torch.randn(3, 4, requires_grad=True)).square().sum().backward()
    folder: Path = tmp_path_factory.mktemp("repo")
    (stored,) = ml.Repo(folder).add(trace, verify=False)
    yield stored


@pytest.mark.parametrize("edited", [OtherChild, OtherOption, OtherAttribute, NoBias, OtherNames])
def test_an_edited_constructor_is_seen(entry: ml.Entry, edited: type[nn.Module]) -> None:
    assert not entry.check(edited)


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        (OtherOption, "norm.eps"),
        (OtherAttribute, "scale"),
        (NoBias, "lin.bias"),
        (OtherNames, "first is new"),
    ],
)
def test_what_of_the_capture_found_no_place_is_said(
    entry: ml.Entry, edited: type[nn.Module], said: str
) -> None:
    assert any(said in warning for warning in entry.check(edited).warnings)


def test_the_captured_weights_are_what_an_edited_class_computes_with(entry: ml.Entry) -> None:
    assert entry.check(SameOtherwise, backward=True).status == "EXACT"


def detached(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).detach()


def zeroes_its_input(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    x.data.zero_()
    return y


def zeroes_a_weight(module: Block, x: Tensor) -> Tensor:
    y = module(x)
    module.lin.weight.data.zero_()
    return y


def flattens(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).flatten()


@pytest.mark.parametrize(
    ("candidate", "status", "path"),
    [
        (detached, "MISMATCH_STRUCTURE", "output"),
        (zeroes_its_input, "MISMATCH_VALUE", "args[0]"),
        (zeroes_a_weight, "MISMATCH_VALUE", 'state["lin.weight"]'),
        (flattens, "MISMATCH_SHAPE", "output"),
    ],
)
def test_what_a_candidate_breaks_beside_its_output_is_named(
    entry: ml.Entry, candidate: object, status: str, path: str
) -> None:
    backward = status != "MISMATCH_VALUE"
    found = entry.check(candidate, backward=backward)
    assert found.status == status
    assert found.worst is not None
    assert found.worst.path == path
