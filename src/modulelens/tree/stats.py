"""Value statistics of a tensor whose data is not kept. Knows tensors, keeps none."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from modulelens.records import QUANTILE_LEVELS, ValueStats
from modulelens.tree.tensors import distinct

_BLOCK = 1 << 20
_SAMPLE = 1 << 16
_MOST_LEVELS = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def value_stats(tensor: Tensor) -> ValueStats:
    """Statistics and constraints of the values; empty for an empty tensor.

    Computed in float64 (float8 and half types lose nothing), block by block. Real and imaginary
    parts of complex values count alike; of a dtype that torch cannot convert, the bytes do.
    """
    if tensor.numel() == 0:
        return ValueStats()
    values = _plain(distinct(tensor.detach()))
    integers = not values.dtype.is_floating_point
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1)
    parts = [_block(part) for part in rows.split(max(1, _BLOCK // rows.shape[1]))]
    share, finite = 1.0 / rows.numel(), sum(p.finite for p in parts)
    facts: dict[str, Any] = {
        "zeros": sum(p.zeros for p in parts) * share,
        "nans": sum(p.nans for p in parts) * share,
        "infs": (sum(p.below for p in parts) * share, sum(p.above for p in parts) * share),
        "discrete": few_valued(tensor),
    }
    if not finite:
        return ValueStats(**facts)
    low, high = min(p.low for p in parts), max(p.high for p in parts)
    mean = sum(p.total for p in parts) / finite
    facts |= {
        "min": low,
        "max": high,
        "mean": mean,
        "std": max(sum(p.squares for p in parts) / finite - mean * mean, 0.0) ** 0.5,
        "quantiles": _quantiles(rows),
        "whole": all(p.whole for p in parts),
        "total": sum(int(p.total) for p in parts) if integers and low >= 0 else None,
    }
    if rows.shape[1] > 1:
        tolerance = 0.0 if integers else max(1e-4, 4 * torch.finfo(values.dtype).eps)
        facts |= {
            "order": next((o for o in _ORDERS if all(o in p.orders for p in parts)), ""),
            "permutation": integers and _permuted(rows, int(low), int(high)),
            "probabilities": low >= 0 and all(p.off_one <= tolerance for p in parts),
            "row_low": _finite(max(p.row_low for p in parts)),
            "row_high": _finite(min(p.row_high for p in parts)),
        }
    return ValueStats(**facts)


def few_valued(tensor: Tensor) -> bool:
    """Whether few different values occur, each more than once on average: a mask, a constant."""
    size = tensor.element_size()
    if size not in _BITS or tensor.numel() == 0:
        return False
    bits = distinct(tensor.detach()).contiguous().view(_BITS[size]).reshape(-1)
    levels = bits[:0]
    for start in (0, *range(_SAMPLE, bits.numel(), _BLOCK)):
        part = bits[start : start + (_BLOCK if start else _SAMPLE)]
        known = torch.isin(part, levels)
        if not known.all():
            levels = torch.cat([levels, part[~known].unique()])
            if levels.numel() > _MOST_LEVELS:
                return False
    return 2 * levels.numel() <= tensor.numel()


@functools.cache
def has_numbers(dtype: torch.dtype) -> bool:
    """Whether torch converts its values; those of bits and sub-byte types are bytes to it."""
    try:
        torch.zeros(1, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype).to(torch.float64)
    except RuntimeError:
        return False
    return True


@dataclasses.dataclass(slots=True)
class _Block:
    """What some rows say; counts are of elements."""

    finite: int
    zeros: int
    nans: int
    below: int
    above: int
    low: float
    high: float
    total: float
    squares: float
    whole: bool
    orders: frozenset[str]
    off_one: float
    row_low: float
    row_high: float


_ORDERS = ("strictly ascending", "ascending", "descending")


def _block(rows: Tensor) -> _Block:
    values = rows.to(torch.float64)
    fits, nans = values.isfinite(), values.isnan()
    finite = values[fits]
    exact = rows.long() if not rows.dtype.is_floating_point else finite
    left, right = values[:, :-1], values[:, 1:]
    holds = (bool((right > left).all()), bool((right >= left).all()), bool((right <= left).all()))
    return _Block(
        finite=finite.numel(),
        zeros=int((values == 0).sum()),
        nans=int(nans.sum()),
        below=int((values == -torch.inf).sum()),
        above=int((values == torch.inf).sum()),
        low=exact.min().item() if finite.numel() else torch.inf,
        high=exact.max().item() if finite.numel() else -torch.inf,
        total=exact.sum().item(),
        squares=float(finite.square().sum()),
        whole=bool((finite == finite.round()).all()),
        orders=frozenset(order for order, held in zip(_ORDERS, holds, strict=True) if held),
        off_one=float((values.sum(-1) - 1).abs().max()),
        row_low=float(values.masked_fill(nans, torch.inf).amin(-1).max()),
        row_high=float(values.masked_fill(nans, -torch.inf).amax(-1).min()),
    )


def _plain(tensor: Tensor) -> Tensor:
    """What torch can convert to float64."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if has_numbers(tensor.dtype) else tensor.contiguous().view(torch.uint8)


def _finite(value: float) -> float | None:
    return value if abs(value) < torch.inf else None


def _permuted(rows: Tensor, low: int, high: int) -> bool:
    size = rows.shape[1]
    if high - low + 1 != size:
        return False
    return bool((rows.long().sort(-1).values == torch.arange(low, high + 1)).all())


def _quantiles(values: Tensor) -> tuple[float, ...]:
    flat = values.reshape(-1)
    step = max(1, flat.numel() // _SAMPLE) | 1  # odd: no column of a table is left out
    sample = flat[::step].to(torch.float64)
    sample = sample[sample.isfinite() & (sample != 0)].sort().values
    if not sample.numel():
        return ()
    places = torch.tensor(QUANTILE_LEVELS, dtype=torch.float64) * (sample.numel() - 1)
    return tuple(sample[places.round().long()].tolist())
