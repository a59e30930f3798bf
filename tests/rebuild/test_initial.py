"""Today's constructor need not make the values that captured ones replace; all others it makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modulelens as ml

WIDE = 256


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def near_one(tensor: Tensor) -> Tensor:
    return nn.init.uniform_(tensor, 0.5, 1.5)


class NewParameter(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.empty(WIDE, WIDE))
        near_one(self.new.data)


class NewView(Wide):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.empty(2, WIDE, WIDE)
        near_one(whole)
        self.new = whole[1]


class InAList(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.news = [near_one(torch.empty(WIDE, WIDE))]

    @property
    def new(self) -> Tensor:
        return self.news[0]


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class InAnObject(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder(near_one(torch.empty(WIDE, WIDE)))

    @property
    def new(self) -> Tensor:
        return self.holder.tensor


class LooksAtItsValues(Wide):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            if near_one(self.lin.weight).min() < 0.5:
                raise ValueError("what was drawn is not what was asked for")


class Keywords(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.empty(8))
        nn.init.normal_(tensor=self.other, mean=5.0, std=0.1)
        nn.init.xavier_uniform_(tensor=self.lin.weight)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ml.Entry]:
    with ml.track_init():
        wide = Wide()
    with ml.trace(wide, name="wide", modules="") as trace:
        wide(torch.randn(2, WIDE))
    folder: Path = tmp_path_factory.mktemp("repo")
    (stored,) = ml.Repo(folder).add(trace, verify=False)
    yield stored


@pytest.mark.parametrize("edited", [NewParameter, NewView, InAList, InAnObject])
def test_what_no_captured_tensor_replaces_has_its_initial_values(
    entry: ml.Entry, edited: type[Wide]
) -> None:
    held = [torch.full((WIDE, WIDE), -7.0) for _ in range(8)]
    del held  # memory that is given out again, and is not zero
    module = entry.rebuild(class_map={entry.cls: edited})
    new = module.new.detach()
    assert isinstance(new, Tensor)
    assert float(new.min()) >= 0.5
    assert float(new.max()) <= 1.5
    assert torch.equal(module.get_parameter("lin.weight"), entry.rebuild().lin.weight)


@pytest.mark.parametrize("edited", [LooksAtItsValues, Keywords])
def test_a_constructor_that_needs_its_values_gets_them(entry: ml.Entry, edited: type[Wide]) -> None:
    assert entry.check(edited).status == "EXACT"


def test_values_that_are_replaced_are_not_drawn(
    entry: ml.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    draw = nn.init.kaiming_uniform_

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        drawn.append(tensor.numel())
        return draw(tensor, *args, **kwargs)

    monkeypatch.setattr(nn.init, "kaiming_uniform_", counted)
    assert entry.check(Keywords).status == "EXACT"
    assert drawn == []
    assert nn.init.kaiming_uniform_ is counted
