"""Modules whose grades need care: registries, ties, and callers that meddle with outputs."""

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


class WritesToOutput(nn.Module):
    """Masks its child's output in place; the output is a view, so its history is written anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.unsqueeze(0))
        y[:, 0] = 0.0
        return y


class HooksActivation(nn.Module):
    """Puts a gradient hook of its own on its child's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.register_hook(lambda grad: grad * 0.5)
        return y.exp()


class SideChannel(nn.Module):
    """Its child's weight reaches the loss through an attribute as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Leaking()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum() + self.inner.penalty


class Leaking(nn.Linear):
    """Keeps a penalty aside instead of returning it."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = self.weight.square().mean()
        return y
