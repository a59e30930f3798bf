"""How wide and how deep."""

from __future__ import annotations

import dataclasses
import enum


class Mixing(enum.Enum):
    """How experts are combined."""

    SOFT = "soft"
    TOP = "top"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The block's sizes."""

    width: int = 448
    heads: int = 8
    experts: int = 4
    expansion: int = 2
    cross_layers: int = 2
    dropout: float = 0.1
    mixing: Mixing = Mixing.SOFT
