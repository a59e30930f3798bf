"""Modules whose replay depends on more than weights and inputs. Each is named by what on."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MovingCodebook(nn.Module):
    """Moves its buffers in training: one in place, one by a new tensor, one by new values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        out = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.seen.scatter_add_(0, nearest, torch.ones(len(x)))
                self.codes = self.codes.lerp(x.mean(0), 0.1)
                self.count.data = self.count + 1
        return x + (out - x).detach() * (1 + self.count)


class PowerIteration(nn.Module):
    """Its weight is divided by a norm that each call brings forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.weight.sum()


class WarmsUp(nn.Module):
    """Behaves by counters and tensors that are no part of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.state: dict[str, Any] = {"step": 0, "ema": None, "log": []}
        self.masks: dict[int, Tensor] = {}
        self.clock = types.SimpleNamespace(ticks=0)

    def forward(self, x: Tensor) -> Tensor:
        self.state["step"] += 1
        self.clock.ticks += 2
        mask = self.masks.setdefault(len(x), torch.rand(len(x), 1) > 0.5)
        old = self.state["ema"]
        self.state["ema"] = x.detach().mean(0) if old is None else old * 0.9
        self.state["log"].append(float(x.detach().sum()))
        share = min(1.0, self.state["step"] / 10) + self.clock.ticks
        return self.fc(x) * share * mask + self.state["ema"]


class OwnStreams(nn.Module):
    """Draws from sources of its own, of three libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.legacy = np.random.RandomState(3)
        self.numpy = np.random.default_rng(4)
        self.torch = torch.Generator().manual_seed(5)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        drawn = float(self.legacy.rand() + self.numpy.random())
        return self.fc(x) * drawn + torch.rand(4, generator=self.torch)


class MixedFlags(nn.Module):
    """Frozen and learning weights, integer inputs, a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4).requires_grad_(False)
        self.fc, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fc.bias.requires_grad_(False)

    def forward(self, ids: Tensor, x: Tensor, leaf: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(self.table(ids))
        return self.fc(x) * leaf + wanted


class HandsMixedFlags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MixedFlags()
        self.leaf = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tensor([1, 2, 3]), x, self.leaf)


class AutocastRegions(nn.Module):
    """Casts, casts back in a region, and depends on the cast's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.low(x)
        with torch.autocast("cpu", enabled=False):
            z = self.high(y.float())
        return z.to(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else z.dtype
        )


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AutocastRegions()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


class OtherMethodReplaced(nn.Module):
    """A method that forward uses is replaced on the instance, by a closure and by a bound one."""

    def __init__(self, factor: float = 3.0) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.Tanh()
        plain = self.act.forward
        self.act.forward = lambda x: plain(x) * factor  # type: ignore[method-assign]
        self.scale = types.MethodType(thrice, self)

    def scale(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.act(self.layer(x)))


def thrice(module: nn.Module, x: Tensor) -> Tensor:
    return x * 3 + module.layer.bias


class ClassSwapped(nn.Module):
    """Its child became another class after it was constructed, as adapters do it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.__class__ = LinearPlusOne

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class LinearPlusOne(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Rotary(nn.Module):
    """Its buffer is in no state dict, and was changed after it was constructed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.frequencies.cos()


def changed_rotary() -> nn.Module:
    model = nn.Sequential(Rotary(), nn.Linear(4, 4))
    model[0].frequencies *= torch.arange(4.0)
    return model


class TiedInParts(nn.Module):
    """One weight under three names, in two modules, once as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.also = nn.Module()
        self.also.weight = self.embed.weight
        self.register_buffer("view", self.embed.weight.detach().t(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + F.linear(x, self.also.weight) + x @ self.view


class ScaledOutside(nn.Linear):
    """Changes what goes in and out in a `__call__` of its own, around the call that torch knows."""

    def __call__(self, x: Tensor, shift: float = 1.0) -> Tensor:
        return super().__call__(x + shift) * 2


class HandsShift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = ScaledOutside(4, 4)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.tanh()).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, shift=3.0)


MODELS = {
    "HandsShift": HandsShift,
    "MovingCodebook": MovingCodebook,
    "PowerIteration": PowerIteration,
    "WarmsUp": WarmsUp,
    "OwnStreams": OwnStreams,
    "MixedFlags": HandsMixedFlags,
    "UnderAutocast": UnderAutocast,
    "OtherMethodReplaced": OtherMethodReplaced,
    "ClassSwapped": ClassSwapped,
    "changed_rotary": changed_rotary,
    "TiedInParts": TiedInParts,
}
