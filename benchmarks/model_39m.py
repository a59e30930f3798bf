"""The benchmarks' model: 39 M parameters, 107 modules, with the habits of real training code.

8 transformer blocks (d=512), 8 EmbeddingBags, a cross net, a head tied to the token embedding, an
in-place ReLU that is called twice, a keyword-only mask, a dataclass output, dropout 0.1.
"""

from __future__ import annotations

import dataclasses

import torch
from loop import Loop
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, BLOCKS, HEADS = 40_600, 512, 8, 8
TABLES, ROWS, BAG_WIDTH = 8, 1_000, 64
BATCH, LENGTH = 2, 64


@dataclasses.dataclass
class Output:
    """What the model returns."""

    loss: Tensor
    logits: Tensor


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        q, k, v = self.qkv(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.act(self.dropout(self.down(self.act(self.up(hidden)))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden), mask=mask)
        return hidden + self.mlp(self.norm2(hidden))


class CrossNet(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, features: Tensor) -> Tensor:
        crossed = features
        for layer in self.layers:
            crossed = features * layer(crossed) + crossed
        return crossed


class Model(nn.Module):
    """Tokens and bags in, `Output` out."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, BAG_WIDTH) for _ in range(TABLES))
        self.cross = CrossNet(TABLES * BAG_WIDTH, 2)
        self.mix = nn.Linear(TABLES * BAG_WIDTH, width)
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, ids: Tensor, targets: Tensor) -> Output:
        pooled = torch.cat([bag(ids[:, i]) for i, bag in enumerate(self.bags)], dim=1)
        hidden = self.tokens(tokens) + self.mix(self.cross(pooled))[:, None]
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        for block in self.blocks:
            hidden = block(hidden, mask=mask)
        logits = self.head(self.norm(hidden))
        return Output(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)


def batch(size: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (size, length), bag ids (size, TABLES, 4), targets (size, length), all int64."""
    tokens = torch.randint(VOCAB, (size, length))
    return tokens, torch.randint(ROWS, (size, TABLES, 4)), torch.randint(VOCAB, (size, length))


def training(optimizer: bool, device: str = "cpu") -> Loop:
    """The model in training, from a fixed seed; with SGD, or with gradients dropped each step."""
    torch.manual_seed(0)
    with torch.device(device):
        model, data = Model(), batch()
    stepper = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer else None
    return Loop(model, data, lambda output: output.loss, stepper)
