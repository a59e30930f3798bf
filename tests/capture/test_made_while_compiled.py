"""Modules that a compiled forward makes while constructor calls are remembered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import modulelens as ml


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class OwnNew(Scaled):
    def __new__(cls, *_: object) -> OwnNew:
        return super().__new__(cls)


class Maker(nn.Module):
    """Makes a module in its forward, between code that Dynamo cannot compile."""

    def __init__(self, made: type[nn.Module], *, broken: bool) -> None:
        super().__init__()
        self.made, self.broken = made, broken
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            torch._dynamo.graph_break()
        layer = self.made(2.0)
        if self.broken:
            torch._dynamo.graph_break()
        return layer(self.linear(x))


@pytest.mark.parametrize("made", [Scaled, OwnNew])
@pytest.mark.parametrize("broken", [False, True])
def test_it_compiles_as_it_would_without(made: type[nn.Module], broken: bool) -> None:
    torch.compiler.reset()
    with ml.track_init():
        model = Maker(made, broken=broken)
        compiled = torch.compile(model, backend="eager")
        x = torch.rand(2, 3)
        assert torch.equal(compiled(x), model(x))
    torch.compiler.reset()
