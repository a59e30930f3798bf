"""Gradient hooks that a module puts on its own outputs: part of what a candidate must do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.capture.loop import add_unverified, rows
from torch import Tensor, nn

import modulelens as ml


def clips(grad: Tensor) -> Tensor:
    return grad.clamp(-0.5, 0.5)


def scales(grad: Tensor) -> Tensor:
    return grad * 0.1


class Hooked(nn.Module):
    """Two outputs; the second is hooked, and normalised so that ones have no gradient."""

    hook: Callable[[Tensor], Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.up(x)
        z = self.norm(y)
        if z.requires_grad and self.hook is not None:
            z.register_hook(type(self).hook)
        return {"y": y, "z": z}


class Clips(Hooked):
    hook = clips


class Scales(Hooked):
    hook = scales


class ClipsByHand(Hooked):
    """As `Clips`, in other operators."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.addmm(self.up.bias, x, self.up.weight.t())
        z = self.norm(y)
        if z.requires_grad:
            z.register_hook(lambda grad: torch.minimum(torch.maximum(grad, LOW), -LOW))
        return {"y": y, "z": z}


LOW = torch.tensor(-0.5)


def entry_of(kind: type[nn.Module], repo: Path) -> ml.Entry:
    torch.manual_seed(0)
    with ml.track_init():
        model = kind()
    with ml.trace(model, modules="", keep=ml.Keep(grads=True)) as trace:
        out = model(rows().requires_grad_())
        (out["z"].square().sum() * 0.01 + out["y"].sum()).backward()
    return add_unverified(trace, repo)[0]


@pytest.mark.parametrize("kind", [Hooked, Clips, Scales])
def test_a_hook_on_an_output_is_part_of_the_gradient(kind: type[nn.Module], tmp_path: Path) -> None:
    entry = entry_of(kind, tmp_path / "repo")
    for other in (Hooked, Clips, Scales):
        check = entry.check(other, backward=True)
        if other is kind:
            assert check.status.passed, check
        else:
            assert check.status is ml.Status.MISMATCH_VALUE
            assert check.reason.startswith('grad through hooks["')
        assert entry.check(other).status is ml.Status.EXACT
    assert entry.check(backward=True).status is ml.Status.EXACT


def test_the_same_hook_in_other_operators_passes(tmp_path: Path) -> None:
    entry = entry_of(Clips, tmp_path / "repo")
    check = entry.check(ClipsByHand, backward=True)
    assert check.status.passed, check
    assert entry.benchmark(Hooked, budget_s=0.1).correct == "MISMATCH_VALUE"
