"""One block: attention over events, crosses, experts."""

from __future__ import annotations

from torch import Tensor, nn

from rankers import constants
from rankers.attention import EventAttention
from rankers.crossing import LowRankCross
from rankers.experts import Experts
from rankers.norms import RmsNorm
from rankers.settings import Settings


class RankingBlock(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, dropout = settings.width, settings.dropout
        self.norm1 = RmsNorm(width)
        self.attention = EventAttention(width, settings.heads, dropout)
        self.cross = LowRankCross(width, settings.cross_layers, width // 4)
        self.norm2 = RmsNorm(width)
        self.experts = Experts(
            width, settings.experts, settings.expansion, dropout, settings.mixing
        )

    def forward(self, events: Tensor) -> Tensor:
        events = events + constants.RESIDUAL * self.attention(self.norm1(events))
        return events + constants.RESIDUAL * self.experts(self.cross(self.norm2(events)))
