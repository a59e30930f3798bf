"""What is measured of an entry: the work that ran, counted by hand, from its captured call."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.loop import add_unverified
from torch import Tensor, nn

import modulelens as ml
from modulelens.measure.flops import _FORMULAS
from modulelens.report.profile import profile_report


def stored(model: nn.Module, folder: Path, *args: Any) -> ml.Entry:
    """The root's entry of a training step on these arguments."""
    with ml.trace(model, modules="", keep=ml.Keep(grads=True)) as trace:
        out = model(*args)
        if out.requires_grad:
            out.sum().backward()
    return add_unverified(trace, folder)[0]


class Branches(nn.Module):
    """Three branches with one shared layer, each called once, and a fourth with its weight."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(100, 100)
        self.parts = nn.ModuleList(
            [nn.Sequential(shared), nn.Sequential(shared, nn.ReLU()), shared]
        )
        self.tied = nn.Linear(100, 100, bias=False)
        self.tied.weight = shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return sum((part(x) for part in self.parts), self.tied(x))


def test_shared_layers_count_as_often_as_they_run_and_their_weights_once(tmp_path: Path) -> None:
    entry = stored(Branches(), tmp_path, torch.randn(1, 100))
    profile = entry.profile(budget_s=0.05)
    assert profile.flops_forward == 4 * 2 * 100 * 100
    assert profile.flops_backward == 4 * 2 * 100 * 100
    assert profile.params == 100 * 100 + 100
    assert profile.param_bytes == 4 * profile.params
    assert entry.metadata.params == profile.params


class Upsamples(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(6, 12, 2, stride=2, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_transposed_convolution_counts_positions_of_its_input(
    groups: int, tmp_path: Path
) -> None:
    entry = stored(Upsamples(groups), tmp_path, torch.randn(2, 6, 5, 7, requires_grad=True))
    profile = entry.profile(budget_s=0.05)
    assert profile.flops_forward == 2 * (2 * 5 * 7) * (6 * 12 // groups) * 4
    assert profile.flops_backward == 2 * profile.flops_forward


@torch.library.custom_op("lens_test::mix", mutates_args=())
def mix(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


class Cubed(torch.autograd.Function):
    """A function of the user's: what it does inside is torch's and is counted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad @ x.t()


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mix(mix(x.detach(), x.detach()), x.detach()) + Cubed.apply(x)


def test_operators_of_others_are_unknown_by_name_until_they_have_a_formula(tmp_path: Path) -> None:
    entry = stored(Mixes(), tmp_path, torch.randn(4, 4, requires_grad=True))
    profile = entry.profile(budget_s=0.05)
    assert profile.flops_unknown == {"lens_test::mix": 2}
    assert not profile.flops_complete
    assert (profile.flops_forward, profile.flops_backward) == (2 * 128, 128)
    assert "lens_test::mix" in profile_report(profile, name="mixes")
    ml.register_formula(torch.ops.lens_test.mix, lambda a, b, **_: 2 * a[0] * a[1] * b[1])
    try:
        profile = entry.profile(budget_s=0.05)
    finally:
        del _FORMULAS["lens_test::mix"]
    assert profile.flops_complete
    assert profile.flops_forward == 4 * 128


class CalledOften(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(16, 16), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).relu_().view(-1, 16)
        return x


@pytest.mark.parametrize("times", [1, 2, 60])
def test_activations_count_per_call_and_views_and_writes_in_place_nothing(
    times: int, tmp_path: Path
) -> None:
    entry = stored(CalledOften(times), tmp_path, torch.randn(8, 16))
    # Saved are the result of each call, as the next one's input and for the relu, once.
    assert entry.profile(budget_s=0.05).saved_bytes == times * 8 * 16 * 4


class SavesTheSame(nn.Module):
    """Several operators save one tensor, its views and a weight; a buffer and the input as well."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))
        self.register_buffer("table", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.gain).exp()
        return y * y.flip(0).flip(0).exp() * self.table + y.t().reshape(-1, 16)[:8] * self.gain


def test_one_storage_is_counted_once_by_whoever_it_is_saved(tmp_path: Path) -> None:
    entry = stored(SavesTheSame(), tmp_path, torch.randn(8, 16))
    one = 8 * 16 * 4
    # exp: its result; the product: exp(flipped) beside it; the second product: its left side
    # needs no gradient for the buffer; the last: the transposed copy.
    saved = entry.profile(budget_s=0.05).saved_bytes
    assert 3 * one <= saved <= 4 * one


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return self.layer(x)


COMPILED: list[int] = []


def warms_up(module: Slow, x: Tensor) -> Tensor:
    COMPILED.append(1)
    time.sleep(0.2 if len(COMPILED) < 3 else 0.002)
    return module.layer(x)


def test_what_only_the_first_runs_cost_is_no_part_of_the_comparison(tmp_path: Path) -> None:
    entry = stored(Slow(), tmp_path, torch.randn(2, 8))
    COMPILED[:] = []
    found = entry.benchmark(warms_up, backward=False, budget_s=2.0)
    assert found.speedup > 2
    assert found.candidate.warmup >= 2
    assert len(found.original.times_s) == len(found.candidate.times_s)
    times = sorted(found.candidate.times_s)
    assert times[0] <= found.candidate.interval_s[0] <= found.candidate.median_s
    assert found.candidate.median_s <= found.candidate.interval_s[1] <= times[-1]
    assert found.correct in ("EXACT", "CLOSE")
    alone = entry.benchmark(backward=False, budget_s=0.05)
    assert alone.first_s >= 0.02
    assert alone.median_s >= 0.02
