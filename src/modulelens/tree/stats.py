"""Value statistics of a tensor whose data is not kept. Knows tensors, keeps none."""

from __future__ import annotations

import torch
from torch import Tensor

from modulelens.records import ValueStats


def value_stats(tensor: Tensor) -> ValueStats:
    """Range, mean, standard deviation, shares of zeros and NaN; empty for an empty tensor.

    Computed in float64 (float8 and half types lose nothing); complex values by magnitude.
    """
    if tensor.numel() == 0:
        return ValueStats()
    values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    values = values.to(torch.float64).flatten()
    zeros, nans = (float(share.double().mean()) for share in (values == 0, values.isnan()))
    finite = values[values.isfinite()]
    if finite.numel() == 0:
        return ValueStats(zeros=zeros, nans=nans)
    return ValueStats(
        min=float(finite.min()),
        max=float(finite.max()),
        mean=float(finite.mean()),
        std=float(finite.std(correction=0)),
        zeros=zeros,
        nans=nans,
    )
