"""The feed-forward part of an expert."""

from __future__ import annotations

from torch import Tensor, nn

from rankers.activations import BY_NAME


class Mlp(nn.Module):
    def __init__(self, width: int, expansion: int, activation: str, dropout: float) -> None:
        super().__init__()
        hidden = expansion * width
        self.activation = activation
        self.up = nn.Linear(width, 2 * hidden if activation == "gated" else hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(BY_NAME[self.activation](self.up(x))))
