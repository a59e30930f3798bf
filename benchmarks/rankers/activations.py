"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gated(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": torch.relu,
    "squared_relu": squared_relu,
    "gated": gated,
}
