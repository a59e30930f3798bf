"""Normalisation with a learned scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankers.constants import EPS


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
