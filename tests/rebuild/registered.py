"""A module whose constructor leaves something behind in the process, and modules around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: What the constructor leaves behind: rebuilt without it, `Registered` gives something else.
SCALES: dict[str, float] = {}


class Registered(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        SCALES[type(self).__name__] = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * SCALES.get(type(self).__name__, 0.0)


class Holder(nn.Module):
    """Graded before `Registered`, and rebuilt by its constructor, which runs the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Registered(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


def doubling(factor: float) -> object:
    """A hook that closes over a number."""

    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output * factor

    return hook


class TiedInside(nn.Module):
    """One weight under two names, both used, and a hooked child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.first.register_forward_hook(doubling(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())
