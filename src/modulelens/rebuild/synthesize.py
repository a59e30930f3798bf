"""Stand-ins for tensors of which only description and statistics were kept.

Deterministic by seed and independent of the process's random streams. Knows statistics, not what
a tensor is for: index, length and mask tensors are kept by value at capture time.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from modulelens.records import TensorRef, ValueStats
from modulelens.tree import dtype_of


class Synthesizer:
    """Makes tensors with the captured shape, strides, range, mean and spread.

    Args:
        seed: Same seed, same tensors.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.made = 0

    def __call__(self, ref: TensorRef) -> Tensor:
        """A tensor for that reference, on the CPU."""
        self.made += 1
        spec = ref.spec
        identity = f"{self._seed}/{self.made}/{spec.dtype}/{spec.shape}".encode()
        generator = torch.Generator().manual_seed(zlib.crc32(identity))
        dtype = dtype_of(spec.dtype)
        # What was expanded holds its values once.
        dense = tuple(n if s else min(n, 1) for n, s in zip(spec.shape, spec.stride, strict=True))
        values = _values(dense, dtype, ref.stats or ValueStats(), generator)
        made = torch.empty_strided(dense, spec.stride, dtype=dtype).copy_(values)
        return made if dense == tuple(spec.shape) else made.expand(spec.shape)


def _values(
    shape: tuple[int, ...], dtype: torch.dtype, stats: ValueStats, generator: torch.Generator
) -> Tensor:
    if dtype is torch.bool:
        share = 1.0 - (stats.zeros if stats.zeros is not None else 0.5)
        return torch.rand(shape, generator=generator) < share
    low = stats.min if stats.min is not None else -3.0
    high = stats.max if stats.max is not None else 3.0
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = (0.0, 1.0) if stats.min is None else (low, high)
        return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)
    mean = stats.mean if stats.mean is not None else 0.0
    std = stats.std if stats.std is not None else 1.0
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean
    drawn = drawn.clamp(low, high)
    if stats.zeros is not None and stats.zeros > 0.01:
        drawn[torch.rand(shape, generator=generator) < stats.zeros] = 0.0
    return drawn.to(dtype)
