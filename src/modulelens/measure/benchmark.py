"""Trials -> times, and two trials -> which one is faster. Knows no module's meaning, only a clock.

A trial prepares, untimed, and returns what is timed: state and inputs start over for every run.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from modulelens.errors import UsageError
from modulelens.measure.run import Run
from modulelens.measure.vary import vary
from modulelens.records import Comparison, Measurement
from modulelens.tree import flatten

Trial = Callable[[], Callable[[], object]]
_cuda: Any = torch.cuda

_MAX_WARMUP = 12
_SHORT_S = 50e-6
_FEWEST = 3
#: Fewest values whose median has a 95 % confidence interval at all.
_FOR_INTERVAL = 6
#: Fewer blocks decide as well where each is this many times faster or slower: that is no noise.
_FAR = 3.0
_RESAMPLES = 1000
_MOST_BLOCKS = 2000


@dataclass(frozen=True)
class RunTrial:
    """A run as a trial. The run's scope is entered and left outside the timed part.

    `part` is "forward", "backward" (the forward then belongs to the preparation), or "both".
    With `values`, values of each run's inputs are up to 2 % closer to zero than those captured: a
    result that was kept from another run is no answer then.
    """

    run: Run
    part: str
    values: random.Random | None = None

    def __call__(self) -> Callable[[], object]:
        """Starts the run over, and returns what is to be timed."""
        self.run.fresh()
        if self.values is not None:
            share = 1 - self.values.random() / 50
            vary(flatten(self.run.inputs).named, lambda values, _: values * share)
        if self.part == "forward":
            return self.run.forward
        if self.part == "both":
            return self._step
        output = self.run.forward()
        return lambda: self.run.backward(output)

    def _step(self) -> object:
        output = self.run.forward()
        self.run.backward(output)
        return output


def trial_of(run: Run, *, backward: bool = False, values: random.Random | None = None) -> RunTrial:
    """Forward, or forward and backward, of a run."""
    return RunTrial(run, "both" if backward else "forward", values)


def benchmark(
    trial: Trial, *, label: str, budget_s: float = 3.0, precision: float = 0.02
) -> Measurement:
    """Times a trial until the median is known well enough, or the budget is spent.

    Args:
        trial: Prepares a run and returns it.
        label: Names the measurement.
        budget_s: Seconds for everything, preparation and warm-up included; three runs are made
            even where it does not suffice.
        precision: Stop when the 95 % confidence interval of the median is narrower than this
            share of it.
    """
    enough = lambda times: _precise(times, precision)  # noqa: E731
    return _measure({label: trial}, budget_s, enough)[0]


def compare_speed(
    original: Trial, candidate: Trial, *, budget_s: float = 6.0, precision: float = 0.02
) -> Comparison:
    """Times two trials side by side, in blocks of one run each in random order.

    The order is drawn from a private generator. `speedup` is the median over the blocks'
    ratios; the measuring stops at a precision, never because of what it shows so far.
    """
    trials = {"original": original, "candidate": candidate}
    enough = lambda *times: _precise(_ratios(*times), precision)  # noqa: E731
    first, second = _measure(trials, budget_s, enough)
    speedup, interval, verdict = judge_speed(first.times_s, second.times_s)
    blocks = len(first.times_s)
    why = "the 95 % interval of the speed-up contains 1"
    if blocks < _FOR_INTERVAL:
        why = f"only {blocks} blocks fit into the budget; {_FOR_INTERVAL} are needed to decide"
    return Comparison(
        original=first,
        candidate=second,
        speedup=speedup,
        interval=interval,
        verdict=verdict,
        notes=(why,) if verdict == "undecided" else (),
    )


def _measure(
    trials: dict[str, Trial], budget_s: float, enough: Callable[..., bool]
) -> list[Measurement]:
    """Times blocks of one run of each trial, with no garbage collection inside a run."""
    order = random.Random(0)
    times: dict[str, list[float]] = {label: [] for label in trials}
    blocks = 0
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        share = 0.45 * budget_s / len(trials)
        warm = {k: _warm_up(trial, time.perf_counter() + share) for k, trial in trials.items()}
        while blocks < _MOST_BLOCKS:
            spent = (time.perf_counter() - start) / budget_s
            if blocks >= _FEWEST and spent >= 1:
                break
            if blocks > _FOR_INTERVAL and enough(*times.values()):
                break
            for label in order.sample(sorted(trials), len(trials)):
                times[label].append(_timed(trials[label]))
            blocks += 1
    finally:
        if was_on:
            gc.enable()
    return [_measurement(label, times[label], warm[label], trials[label]) for label in trials]


def judge_speed(
    original_s: Sequence[float], candidate_s: Sequence[float]
) -> tuple[float, tuple[float, float], str]:
    """Speed-up, its 95 % bootstrap interval, and "faster", "slower" or "undecided".

    The times are paired by block. Fewer than six decide where each says three times or more.
    """
    ratios = _ratios(original_s, candidate_s)
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]
    verdict = "faster" if low > 1 else "slower" if high < 1 else "undecided"
    if len(ratios) < _FOR_INTERVAL and not (low > _FAR or high < 1 / _FAR):
        verdict = "undecided"
    return median(ratios), (low, high), verdict


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median by order statistics; the range for fewer than six."""
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half) - 1)
    return ordered[low], ordered[high]


def _ratios(original_s: Sequence[float], candidate_s: Sequence[float]) -> list[float]:
    return [a / max(b, 1e-9) for a, b in zip(original_s, candidate_s, strict=True)]


def _precise(values: Sequence[float], precision: float) -> bool:
    low, high = median_interval(values)
    return high - low <= precision * median(values)


def _warm_up(trial: Trial, until: float) -> list[float]:
    """At least two runs, then until a run is no longer clearly faster than all before it."""
    times = [_timed(trial), _timed(trial)]
    while len(times) < _MAX_WARMUP and time.perf_counter() < until:
        if times[-1] > 0.95 * min(times[:-1]):
            break
        times.append(_timed(trial))
    return times


def _timed(trial: Trial) -> float:
    with trial.run if isinstance(trial, RunTrial) else nullcontext():
        run = trial()
        _synchronise()
        start = time.perf_counter_ns()
        result = run()
        _synchronise()
        end = time.perf_counter_ns()
        del result
    return (end - start) * 1e-9


def _synchronise() -> None:
    if _cuda.is_initialized():
        _cuda.synchronize()


def _measurement(label: str, times: list[float], warm: list[float], trial: Trial) -> Measurement:
    notes = []
    if not median(times) > 0:
        text = f"the clock stood still while {label} ran"
        raise UsageError(text, hint="leave time.perf_counter_ns as it is: it is what times are of")
    if median(times) < _SHORT_S:
        notes.append(f"shorter than {_SHORT_S * 1e6:.0f} us: the cost of the call itself counts")
    if len(times) < _FOR_INTERVAL:
        notes.append(f"only {len(times)} runs fit into the budget")
    known = trial if isinstance(trial, RunTrial) else None
    return Measurement(
        label=label,
        times_s=tuple(times),
        first_s=warm[0],
        warmup=len(warm),
        backward=known is not None and known.part != "forward",
        device=str(known.run.device) if known else "cpu",
        num_threads=known.run.context.num_threads if known else torch.get_num_threads(),
        interval_s=median_interval(times),
        notes=tuple(notes),
    )
