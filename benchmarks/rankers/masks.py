"""Which events may see which."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def buckets(count: int, longest: int) -> Tensor:
    """Borders of logarithmic distance buckets."""
    return torch.from_numpy(np.geomspace(1, longest, count).astype(np.float32))
