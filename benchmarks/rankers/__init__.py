"""A user's package for `edit.py`: a block of a ranking model, in eleven files that import."""

from rankers.block import RankingBlock
from rankers.settings import Settings

__all__ = ["RankingBlock", "Settings"]
