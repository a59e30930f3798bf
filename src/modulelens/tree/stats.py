"""Value statistics of a tensor whose data is not kept. Knows tensors, keeps none."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from modulelens.records import QUANTILE_LEVELS, ValueStats
from modulelens.tree.tensors import distinct

_BLOCK = 1 << 20
_SAMPLE = 1 << 17
_MOST_LEVELS = 16
_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def value_stats(tensor: Tensor) -> ValueStats:
    """Statistics and constraints of the values; empty for an empty tensor.

    Computed in float64 (float8 and half types lose nothing). Of a large float tensor without
    infinities and NaN range and constraints are those of all values, the rest is of a sample.
    Real and imaginary parts of complex values count alike.
    """
    if tensor.numel() == 0:
        return ValueStats()
    values = distinct(tensor.detach())
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1)
    discrete, bounds = few_valued(tensor), _finite_bounds(rows)
    some = rows if discrete or bounds is None else _sampled(rows)
    found = _stats(some, discrete=discrete)
    if some is rows or bounds is None:
        return found
    if found.order or found.probabilities or found.whole:
        return _stats(rows, discrete=discrete)
    low, high = bounds
    return msgspec.structs.replace(found, min=low, max=high, row_low=None, row_high=None)


def _stats(rows: Tensor, *, discrete: bool) -> ValueStats:
    values, integers = rows.to(torch.float64), not rows.dtype.is_floating_point
    fits, nans = values.isfinite(), values.isnan()
    finite = values[fits]
    facts: dict[str, Any] = {
        "zeros": _share(values == 0),
        "nans": _share(nans),
        "infs": (_share(values == -torch.inf), _share(values == torch.inf)),
        "discrete": discrete,
    }
    if not finite.numel():
        return ValueStats(**facts)
    exact = rows.long() if integers else finite
    low, high = exact.min().item(), exact.max().item()
    facts |= {
        "min": low,
        "max": high,
        "mean": float(finite.mean()),
        "std": float(finite.std(correction=0)),
        "quantiles": _quantiles(finite),
        "whole": bool((finite == finite.round()).all()),
        "total": int(exact.sum()) if integers and low >= 0 else None,
    }
    if rows.shape[1] > 1:
        sums = values.sum(-1)
        tolerance = 0.0 if integers else max(1e-4, 4 * torch.finfo(rows.dtype).eps)
        lows = values.masked_fill(nans, torch.inf).amin(-1)
        highs = values.masked_fill(nans, -torch.inf).amax(-1)
        facts |= {
            "order": _order(values),
            "permutation": integers and _permuted(rows, int(low), int(high)),
            "probabilities": low >= 0 and bool(((sums - 1).abs() <= tolerance).all()),
            "row_low": _finite(lows.max().item()),
            "row_high": _finite(highs.min().item()),
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


def _share(chosen: Tensor) -> float:
    return int(chosen.sum()) / chosen.numel()


def _order(rows: Tensor) -> str:
    left, right = rows[:, :-1], rows[:, 1:]
    if bool((right >= left).all()):
        return "strictly ascending" if bool((right > left).all()) else "ascending"
    return "descending" if bool((right <= left).all()) else ""


def _finite(value: float) -> float | None:
    return value if abs(value) < torch.inf else None


def _permuted(rows: Tensor, low: int, high: int) -> bool:
    size = rows.shape[1]
    if high - low + 1 != size:
        return False
    return bool((rows.long().sort(-1).values == torch.arange(low, high + 1)).all())


def _finite_bounds(rows: Tensor) -> tuple[float, float] | None:
    """Least and greatest value of floats that are all finite; None of others."""
    if rows.dtype not in _COMPARED:
        return None
    low, high = (bound.item() for bound in rows.aminmax())
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _sampled(rows: Tensor) -> Tensor:
    """About `_SAMPLE` elements, whole rows where there are many."""
    step = rows.numel() // _SAMPLE
    if step < 2:
        return rows
    step |= 1  # odd: no column of a table is left out
    return rows[::step] if len(rows) >= step else rows[:, ::step]


def _quantiles(finite: Tensor) -> tuple[float, ...]:
    flat = _sampled(finite[finite != 0][None])[0].sort().values
    if not flat.numel():
        return ()
    places = torch.tensor(QUANTILE_LEVELS, dtype=torch.float64) * (flat.numel() - 1)
    return tuple(flat[places.round().long()].tolist())
