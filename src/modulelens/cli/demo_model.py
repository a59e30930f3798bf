"""The ranking model of `modulelens demo`: embeddings, a bottom MLP, interactions, an over arch.

Plain torch, written the way such models are first written: clear, and slow in one place.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with SiLU between them; `(batch, sizes[0])` -> `(batch, sizes[-1])`."""

    def __init__(self, sizes: list[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """All layers but the last are followed by SiLU and dropout."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.dropout(nn.functional.silu(layer(x)))
        out: Tensor = last(x)
        return out


class Interaction(nn.Module):
    """Scaled dot products of all pairs of features, with dropout, behind the dense features.

    `(batch, features, dim)` -> `(batch, dim + features * (features - 1) / 2)`.
    """

    def __init__(self, dim: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.scale = dim**-0.5
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """One small dot product per pair."""
        count = features.shape[1]
        dots = [
            (features[:, i] * features[:, j]).sum(dim=1) * self.scale
            for i in range(count)
            for j in range(i + 1, count)
        ]
        return torch.cat([features[:, 0], self.dropout(torch.stack(dots, dim=1))], dim=1)


class RankingModel(nn.Module):
    """Dense features and bags of ids in, one logit per row out."""

    def __init__(
        self, dense: int = 13, tables: int = 8, rows: int = 5000, dim: int = 32, hidden: int = 256
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = MLP([dense, hidden, dim])
        self.interaction = Interaction(dim)
        pairs = (tables + 1) * tables // 2
        self.over_arch = MLP([dim + pairs, hidden, hidden, 1], dropout=0.1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """`dense` is `(batch, dense)`, `ids` is `(tables, batch, ids per bag)`."""
        bags = [table(bag) for table, bag in zip(self.tables, ids, strict=True)]
        features = torch.stack([self.bottom(dense), *bags], dim=1)
        logits: Tensor = self.over_arch(self.interaction(features))
        return logits.squeeze(1)
