"""Stand-ins for tensors of which only description and statistics were kept.

Deterministic by seed and independent of the process's random streams. Knows statistics, not what
a tensor is for: masks and small index, length and offset tensors are kept by value.
"""

from __future__ import annotations

import zlib

import msgspec
import torch
from torch import Tensor

from modulelens.records import QUANTILE_LEVELS, TensorRef, ValueStats
from modulelens.tree import distinct

_BLOCK = 1 << 20


class Synthesizer:
    """Fills tensors with values of the captured distribution that keep the captured constraints.

    Args:
        seed: Same seed, same tensors, in whatever order they are asked for.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.made = 0

    def __call__(self, ref: TensorRef, into: Tensor) -> None:
        """Writes values for that reference into a tensor of its shape and strides."""
        self.made += 1
        identity = f"{self.seed}/{ref.group}/{ref.offset}/{ref.spec.dtype}/{ref.spec.shape}"
        generator = torch.Generator().manual_seed(zlib.crc32(identity.encode()))
        stats, target = ref.stats or ValueStats(), _once(into)
        if target.dim() > 1:  # block by block: a table of many gigabytes is drawn in few
            stats = msgspec.structs.replace(stats, total=None)
            rows = max(1, _BLOCK * len(target) // max(target.numel(), 1))
        else:
            rows = max(target.numel(), 1)
        for part in target.split(rows) if target.dim() else (target,):
            part.copy_(_values(part, stats, generator))


def _once(tensor: Tensor) -> Tensor:
    """The tensor's memory, each element once: without expanded and overlapping dimensions."""
    tensor, reach = distinct(tensor), 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            return tensor.as_strided((last + 1,), (1,))
        reach += (size - 1) * stride
    return tensor


def _values(like: Tensor, stats: ValueStats, generator: torch.Generator) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(_drawn((*like.shape, 2), stats, generator))
    drawn = _drawn(tuple(like.shape), stats, generator)
    if like.dtype.is_floating_point or stats.min is None or stats.max is None:
        return drawn
    return drawn.long().clamp(int(stats.min), int(stats.max))


def _drawn(shape: tuple[int, ...], stats: ValueStats, generator: torch.Generator) -> Tensor:
    """Values as float64, rounded where all were integers."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    if stats.min is None or stats.max is None:  # nothing was finite, or nothing is known
        values = torch.zeros_like(uniform) if stats.nans else uniform
        return _infinite(values, stats, generator)
    low, high = float(stats.min), float(stats.max)
    if stats.permutation and not stats.order:
        return uniform.argsort(-1).double() + low
    values = _spread(uniform, stats, generator)
    values = values.round() if stats.whole else values
    values = _infinite(values.clamp(low, high), stats, generator)
    if values.dim() and values.shape[-1] > 1:
        _widen_rows(values, stats, generator)
        if stats.probabilities and stats.whole:  # one-hot
            values = torch.zeros_like(values).scatter_(-1, uniform.argmax(-1, keepdim=True), 1.0)
        elif stats.probabilities:
            values /= values.sum(-1, keepdim=True)
    if stats.total is not None and not stats.order.endswith("ascending"):
        values = _summing(values, stats)
    return _ordered(values, stats) if stats.order else values


def _spread(uniform: Tensor, stats: ValueStats, generator: torch.Generator) -> Tensor:
    """The captured distribution, by its quantiles; by mean and spread where there are none."""
    if stats.quantiles:
        levels = torch.tensor(QUANTILE_LEVELS, dtype=torch.float64)
        known = torch.tensor(stats.quantiles, dtype=torch.float64)
        above = torch.searchsorted(levels, uniform, right=True).clamp_(1, len(levels) - 1)
        share = (uniform - levels[above - 1]) / (levels[above] - levels[above - 1])
        # Tails thin out towards the extremes.
        share = torch.where(above == len(levels) - 1, share**4, share)
        share = torch.where(above == 1, 1 - (1 - share) ** 4, share)
        if stats.discrete:  # nothing in between
            share = share.round()
        values = known[above - 1].lerp(known[above], share)
    else:
        values = torch.randn(uniform.shape, generator=generator, dtype=torch.float64)
        values = values * (stats.std or 0.0) + (stats.mean or 0.0)
    others = (stats.nans or 0.0) + sum(stats.infs)
    return _share(values, 0.0, (stats.zeros or 0.0) / max(1 - others, 1e-9), generator)


def _infinite(values: Tensor, stats: ValueStats, generator: torch.Generator) -> Tensor:
    below, above = stats.infs
    values = _share(values, -torch.inf, below, generator)
    return _share(values, torch.inf, above / (1 - below) if below < 1 else 0.0, generator)


def _share(values: Tensor, value: float, share: float, generator: torch.Generator) -> Tensor:
    if share == 0:
        return values
    return values.masked_fill(torch.rand(values.shape, generator=generator) < share, value)


def _widen_rows(values: Tensor, stats: ValueStats, generator: torch.Generator) -> None:
    """Puts one value into each row that reaches less far than every captured row did.

    So no row of a mask is masked altogether where none was.
    """
    for bound, sign in ((stats.row_low, 1), (stats.row_high, -1)):
        if bound is not None:
            nearest = (values * sign).amin(-1, keepdim=True)
            chance = torch.rand(values.shape, generator=generator)
            place = chance.masked_fill(values * sign > nearest, -1.0).argmax(-1, keepdim=True)
            near = values.gather(-1, place)
            values.scatter_(-1, place, near.masked_fill(nearest > bound * sign, bound))


def _ordered(values: Tensor, stats: ValueStats) -> Tensor:
    """Each row sorted; one row alone, such as offsets, also begins and ends as captured."""
    low, high = float(stats.min or 0), float(stats.max or 0)
    if stats.order == "descending":
        return values.sort(-1, descending=True).values
    values = values.sort(-1).values
    count = values.shape[-1]
    if stats.order.startswith("strictly") and stats.whole:
        steps = torch.arange(count, dtype=torch.float64)
        values = (values - steps).cummax(-1).values.clamp(low, high - (count - 1)) + steps
    if values.dim() == 1:
        values[0], values[-1] = low, high
    return values


def _summing(values: Tensor, stats: ValueStats) -> Tensor:
    """Non-negative integers with the captured sum, each within the captured range."""
    low, high, total = int(stats.min or 0), int(stats.max or 0), stats.total or 0
    flat = values.long().reshape(-1)
    if low == high or not low * flat.numel() <= total <= high * flat.numel():
        return values
    missing = total - int(flat.sum())
    room = high - flat if missing > 0 else flat - low
    # In shares of the room, so that no part of the tensor takes it all.
    part = (room.double() * (abs(missing) / max(int(room.sum()), 1))).long()
    rest = abs(missing) - int(part.sum())
    left = room - part
    part += (rest - (left.cumsum(0) - left)).clamp(min=0).minimum(left)
    return (flat + (part if missing > 0 else -part)).reshape(values.shape).double()
