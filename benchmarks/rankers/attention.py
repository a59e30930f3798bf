"""Attention over a user's events, with a bias by distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankers import masks
from rankers.norms import RmsNorm


class DistanceBias(nn.Module):
    def __init__(self, heads: int, buckets: int = 16, longest: int = 512) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets + 1, heads)
        self.register_buffer("borders", masks.buckets(buckets, longest))

    def forward(self, length: int) -> Tensor:
        place = torch.arange(length, device=self.borders.device)
        distance = (place[:, None] - place[None, :]).clamp(min=0).float()
        return self.table(torch.bucketize(distance, self.borders)).permute(2, 0, 1)


class EventAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm = RmsNorm(width // heads)
        self.k_norm = RmsNorm(width // heads)
        self.bias = DistanceBias(heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.bias(length).masked_fill(~masks.causal(length), float("-inf"))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask=bias, dropout_p=dropout
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))
