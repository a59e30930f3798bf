"""Times are taken around the right thing, often enough, and two of them are told apart fairly."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch
from torch import nn

from modulelens.context import RngWatch, read_ambient
from modulelens.errors import UsageError
from modulelens.measure.benchmark import (
    RunTrial,
    benchmark,
    compare_speed,
    judge_speed,
    median_interval,
    trial_of,
)
from modulelens.measure.run import Run
from modulelens.records import Ambient


def sleeping(seconds, prepare=0.0, log=None):
    def trial():
        time.sleep(prepare)

        def run():
            if log is not None:
                log.append(seconds)
            time.sleep(seconds)

        return run

    return trial


def test_preparation_is_not_timed():
    measured = benchmark(sleeping(0.001, prepare=0.02), label="x", budget_s=0.4)
    assert measured.median_s < 0.015
    assert measured.warmup >= 2
    assert measured.first_s >= 0.001
    assert measured.interval_s[0] <= measured.median_s <= measured.interval_s[1]


def test_a_slow_first_run_is_kept_apart():
    calls = iter([0.1, 0.05])

    def trial():
        return lambda: time.sleep(next(calls, 0.001))

    measured = benchmark(trial, label="x", budget_s=20, precision=10)
    assert measured.first_s >= 0.1
    assert measured.median_s < 0.05
    assert measured.warmup >= 3


def test_the_budget_ends_a_slow_trial_and_says_so():
    start = time.perf_counter()
    measured = benchmark(sleeping(0.2), label="x", budget_s=0.3)
    assert len(measured.times_s) == 3
    assert time.perf_counter() - start < 5
    assert any("3 runs" in note for note in measured.notes)


def test_a_steady_trial_ends_before_its_budget():
    times = iter(range(10**6))
    measured = benchmark(lambda: lambda: next(times), label="x", budget_s=30, precision=5.0)
    assert len(measured.times_s) == 7
    assert any("us" in note for note in measured.notes)


def test_collection_is_off_inside_and_as_before_after():
    inside = []
    benchmark(lambda: lambda: inside.append(gc.isenabled()), label="x", budget_s=0.05)
    assert set(inside) == {False}
    assert gc.isenabled()


def test_the_interval_holds_the_median_as_often_as_it_says():
    draw = random.Random(1)
    for count in (6, 7, 20, 101):
        held = 0
        for _ in range(600):
            low, high = median_interval([draw.gauss(0, 1) for _ in range(count)])
            held += low <= 0 <= high
        assert held / 600 > 0.92


def test_blocks_are_interleaved_and_twice_as_fast_is_found():
    log = []
    state = RngWatch().read().python
    result = compare_speed(
        sleeping(0.004, log=log), sleeping(0.002, log=log), budget_s=2.0, precision=0.1
    )
    assert result.verdict == "faster"
    assert 1.3 < result.speedup < 2.5
    assert result.interval[0] <= result.speedup <= result.interval[1]
    blocks = [tuple(log[i : i + 2]) for i in range(len(log) % 2, len(log), 2)][-6:]
    assert all(set(block) == {0.004, 0.002} for block in blocks)
    after = RngWatch().read().python
    assert torch.equal(state[0], after[0])


def test_the_same_twice_is_not_called_faster_more_often_than_it_should():
    draw = random.Random(2)
    noise = lambda: draw.lognormvariate(0, 0.1)  # noqa: E731
    wrong = 0
    for _ in range(100):
        verdict = judge_speed([noise() for _ in range(15)], [noise() for _ in range(15)])[2]
        wrong += verdict != "undecided"
    assert wrong <= 15


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "faster"), (0.8, "slower")])
def test_a_drift_that_hits_both_sides_does_not_hide_a_difference(factor, verdict):
    draw = random.Random(3)
    drift = [1 + i / 5 for i in range(20)]
    original = [d * factor * draw.lognormvariate(0, 0.02) for d in drift]
    candidate = [d * draw.lognormvariate(0, 0.02) for d in drift]
    speedup, interval, found = judge_speed(original, candidate)
    assert found == verdict
    assert interval[0] < factor < interval[1] or abs(speedup - factor) < 0.05


def test_too_few_blocks_decide_nothing():
    assert judge_speed([2.0] * 5, [1.0] * 5)[2] == "undecided"
    result = compare_speed(sleeping(0.1), sleeping(0.05), budget_s=0.05)
    assert result.verdict == "undecided"
    assert "blocks" in result.notes[0]


def test_few_blocks_decide_what_is_beyond_all_noise():
    assert judge_speed([0.001, 0.002, 0.001], [5.0, 4.0, 6.0])[2] == "slower"
    assert judge_speed([5.0] * 4, [1.0] * 4)[2] == "faster"
    assert judge_speed([5.0, 5.0, 1.0], [1.0] * 3)[2] == "undecided"
    result = compare_speed(sleeping(0.0), sleeping(0.1), budget_s=0.05)
    assert result.verdict == "slower"


def test_a_clock_that_stands_still_is_named(monkeypatch):
    monkeypatch.setattr("time.perf_counter_ns", lambda: 7)
    with pytest.raises(UsageError, match="the clock stood still while original ran"):
        compare_speed(sleeping(0.0), sleeping(0.0), budget_s=0.05)


class CountsItsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.seen = []

    def forward(self, x):
        self.seen.append(int(self.norm.num_batches_tracked))
        return self.norm(x.add_(1))


def test_every_timed_run_starts_from_the_same_state():
    module = CountsItsCalls()
    spy = []
    module.register_forward_hook(lambda m, args, out: spy.append((list(m.seen), args[0].sum())))
    run = Run(module, (torch.zeros(3, 4),))
    with run:
        benchmark(trial_of(run), label="x", budget_s=0.05)
        benchmark(trial_of(run, backward=True), label="x", budget_s=0.05)
        benchmark(RunTrial(run, "backward"), label="x", budget_s=0.05)
    assert all(seen == [0] and total == 12 for seen, total in spy)
    assert module.norm.weight.grad is not None


class SaysWhenItIsPrepared(Run):
    """Notes whether the scope is open by the time of the untimed preparation."""

    def fresh(self):
        self.seen.append(torch.get_num_threads() == self.context.num_threads)
        super().fresh()


def test_a_runs_scope_is_entered_before_the_timed_part():
    context = Ambient(num_threads=2, grad_enabled=False)
    before = read_ambient()
    run = SaysWhenItIsPrepared(nn.Identity(), (torch.ones(1),), context=context)
    run.seen = []
    measured = benchmark(trial_of(run), label="x", budget_s=0.1)
    with run:
        benchmark(trial_of(run), label="x", budget_s=0.1)
        assert torch.get_num_threads() == 2
    assert set(run.seen) == {True}
    assert (measured.num_threads, measured.device, measured.backward) == (2, "cpu", False)
    assert read_ambient() == before


def test_two_runs_keep_their_own_contexts():
    seen = set()

    def run_with(threads):
        def forward(x):
            seen.add((threads, torch.get_num_threads()))
            return x

        return Run(forward, (torch.ones(1),), context=Ambient(num_threads=threads))

    same = trial_of(run_with(1))
    compare_speed(same, trial_of(run_with(2)), budget_s=0.2)
    assert seen == {(1, 1), (2, 2)}
    result = compare_speed(same, same, budget_s=0.2)
    assert result.interval[0] <= result.speedup <= result.interval[1]
