"""Trials -> times, and two trials -> which one is faster. Knows no module's meaning, only a clock.

A trial prepares, untimed, and returns what is timed: state and inputs start over for every run.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from modulelens.measure.run import Run
from modulelens.records import Comparison, Measurement

Trial = Callable[[], Callable[[], object]]
_cuda: Any = torch.cuda

_MAX_WARMUP = 12
_SHORT_S = 50e-6
_FEWEST = 3
#: Fewest values whose median has a 95 % confidence interval at all.
_FOR_INTERVAL = 6
_RESAMPLES = 1000
_MOST_BLOCKS = 1000


@dataclass(frozen=True)
class RunTrial:
    """A run as a trial. The run's scope is entered and left outside the timed part.

    `part` is "forward", "backward" (the forward then belongs to the preparation), or "both".
    """

    run: Run
    part: str

    def __call__(self) -> Callable[[], object]:
        """Starts the run over, and returns what is to be timed."""
        self.run.fresh()
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

    def scope(self) -> AbstractContextManager[object]:
        """The run's scope; nothing where it is entered already."""
        return nullcontext() if self.run.entered else self.run

    @property
    def threads(self) -> int:
        """Threads that the run computes with."""
        context = self.run.context
        return context.num_threads if context is not None else torch.get_num_threads()


def trial_of(run: Run, *, backward: bool = False) -> RunTrial:
    """Forward, or forward and backward, of a run."""
    return RunTrial(run, "both" if backward else "forward")


def backward_trial(run: Run) -> RunTrial:
    """The backward alone."""
    return RunTrial(run, "backward")


def benchmark(
    trial: Trial,
    *,
    label: str,
    budget_s: float = 3.0,
    precision: float = 0.02,
    min_runs: int = 7,
    max_runs: int = 2000,
    progress: Callable[[float], None] | None = None,
) -> Measurement:
    """Times a trial until the median is known well enough, or the budget is spent.

    Args:
        trial: Prepares a run and returns it.
        label: Names the measurement.
        budget_s: Seconds for everything, preparation and warm-up included; three runs are made
            even where it does not suffice.
        precision: Stop when the 95 % confidence interval of the median is narrower than this
            share of it.
        min_runs: Fewest timed runs before `precision` may end it.
        max_runs: Most timed runs.
        progress: Told the share of the budget that is spent.
    """
    with _quiet():
        end = time.perf_counter() + budget_s
        warm = _warm_up(trial, end - 0.5 * budget_s)
        times: list[float] = []
        while len(times) < max_runs:
            left = end - time.perf_counter()
            if progress is not None:
                progress(min(1.0, 1 - left / budget_s))
            if len(times) >= _FEWEST and left <= 0:
                break
            if len(times) >= min_runs and _precise(times, precision):
                break
            times.append(_timed(trial))
    return _measurement(label, times, warm, trial)


def compare_speed(
    original: Trial,
    candidate: Trial,
    *,
    labels: tuple[str, str] = ("original", "candidate"),
    budget_s: float = 6.0,
    precision: float = 0.02,
    progress: Callable[[float], None] | None = None,
) -> Comparison:
    """Times two trials side by side, in blocks of one run each in random order.

    The order is drawn from a private generator. `speedup` is the median over the blocks'
    ratios; the measuring stops at a precision, never because of what it shows so far.
    """
    order = random.Random(0)
    trials = original, candidate
    times: tuple[list[float], list[float]] = [], []
    with _quiet():
        end = time.perf_counter() + budget_s
        warm = [_warm_up(t, time.perf_counter() + 0.2 * budget_s) for t in trials]
        while len(times[0]) < _MOST_BLOCKS:
            left = end - time.perf_counter()
            if progress is not None:
                progress(min(1.0, 1 - left / budget_s))
            if len(times[0]) >= _FEWEST and left <= 0:
                break
            if len(times[0]) >= _FOR_INTERVAL and _precise(_ratios(*times), precision):
                break
            for which in order.sample((0, 1), 2):
                times[which].append(_timed(trials[which]))
    speedup, interval, verdict = judge_speed(*times)
    notes = () if verdict != "undecided" else (_why_undecided(len(times[0])),)
    return Comparison(
        original=_measurement(labels[0], times[0], warm[0], original),
        candidate=_measurement(labels[1], times[1], warm[1], candidate),
        speedup=speedup,
        interval=interval,
        verdict=verdict,
        notes=notes,
    )


def judge_speed(
    original_s: Sequence[float], candidate_s: Sequence[float]
) -> tuple[float, tuple[float, float], str]:
    """Speed-up, its 95 % bootstrap interval, and "faster", "slower" or "undecided".

    The times are paired by block. Fewer than six blocks decide nothing.
    """
    ratios = _ratios(original_s, candidate_s)
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]
    verdict = "undecided"
    if len(ratios) >= _FOR_INTERVAL:
        verdict = "faster" if low > 1 else "slower" if high < 1 else "undecided"
    return statistics.median(ratios), (low, high), verdict


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
    return high - low <= precision * statistics.median(values)


def _warm_up(trial: Trial, until: float) -> list[float]:
    """At least two runs, then until a run is no longer clearly faster than all before it."""
    times = [_timed(trial), _timed(trial)]
    while len(times) < _MAX_WARMUP and time.perf_counter() < until:
        if times[-1] > 0.95 * min(times[:-1]):
            break
        times.append(_timed(trial))
    return times


def _timed(trial: Trial) -> float:
    with trial.scope() if isinstance(trial, RunTrial) else nullcontext():
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


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection inside a timed run."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _measurement(label: str, times: list[float], warm: list[float], trial: Trial) -> Measurement:
    notes = []
    if statistics.median(times) < _SHORT_S:
        resolution = time.get_clock_info("perf_counter").resolution
        notes.append(
            f"shorter than {_SHORT_S * 1e6:.0f} us: the clock resolves {resolution * 1e9:.0f} ns, "
            "and the cost of the call itself is part of it"
        )
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
        num_threads=known.threads if known else torch.get_num_threads(),
        interval_s=median_interval(times),
        notes=tuple(notes),
    )


def _why_undecided(blocks: int) -> str:
    if blocks < _FOR_INTERVAL:
        return f"only {blocks} blocks fit into the budget; {_FOR_INTERVAL} are needed to decide"
    return "the 95 % interval of the speed-up contains 1"
