"""Raw times and what is derived from them. Raw values are kept; statistics are properties."""

from __future__ import annotations

import statistics
from typing import Annotated

import msgspec


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times of one callable on one set of inputs.

    `times_s` are seconds per run in the order in which they were taken, warm-up not included.
    `first_s` is the very first run (compilation, allocation). `interval_s` is a 95 % confidence
    interval of the median.
    """

    label: str
    times_s: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    first_s: float = 0.0
    warmup: int = 0
    backward: bool = False
    device: str = "cpu"
    num_threads: int = 1
    synthesized: bool = False
    interval_s: tuple[float, float] = (0.0, 0.0)
    notes: tuple[str, ...] = ()

    @property
    def median_s(self) -> float:
        """Median of `times_s`, in seconds."""
        return statistics.median(self.times_s)

    @property
    def min_s(self) -> float:
        """Smallest of `times_s`, in seconds."""
        return min(self.times_s)

    @property
    def iqr_s(self) -> float:
        """Distance between the quartiles of `times_s`, in seconds; 0 for fewer than 4 runs."""
        if len(self.times_s) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.times_s, n=4)
        return high - low


class Comparison(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An interleaved A/B benchmark.

    `speedup` is original / candidate (above 1: the candidate is faster), the median over paired
    blocks; `interval` its 95 % bootstrap confidence interval. `verdict` is "faster", "slower",
    or "undecided" when the interval contains 1.
    """

    original: Measurement
    candidate: Measurement
    speedup: float
    interval: tuple[float, float]
    verdict: str
    correct: str = ""
    notes: tuple[str, ...] = ()
