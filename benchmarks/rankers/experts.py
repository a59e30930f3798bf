"""A mixture of experts, soft or of the best two."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankers.constants import TEMPERATURE
from rankers.mlp import Mlp
from rankers.settings import Mixing


class Experts(nn.Module):
    def __init__(
        self, width: int, count: int, expansion: int, dropout: float, mixing: Mixing
    ) -> None:
        super().__init__()
        self.mixing = mixing
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            Mlp(width, expansion, "gated" if i % 2 else "gelu", dropout) for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x) / TEMPERATURE
        if self.mixing is Mixing.TOP:
            best = scores.topk(2, dim=-1)
            scores = torch.full_like(scores, float("-inf")).scatter(-1, best.indices, best.values)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * scores.softmax(-1)[..., None, :]).sum(-1)
