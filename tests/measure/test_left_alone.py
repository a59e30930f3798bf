"""What a candidate may not do beside its work: change state that the original leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.loop import add_unverified, rows
from torch import Tensor, nn

import modulelens as ml


class Gated(nn.Module):
    """Moves its counter, its mean and its last input; leaves all else alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))
        self.scales, self.calls, self.last = [1.0, 2.0], 0, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.last = x.detach()
        return self.norm(self.up(x)) * self.mask + self.scales[0]


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> ml.Entry:
    torch.manual_seed(0)
    with ml.track_init():
        model = Gated()
    with ml.trace(model, modules="", keep=ml.Keep(grads=True)) as trace:
        model(rows()).sum().backward()
    return add_unverified(trace, tmp_path_factory.mktemp("left") / "repo")[0]


def moves_a_weight(m: Gated) -> None:
    m.up.weight.data = m.up.weight.data.clone().neg_()


def replaces_a_bias(m: Gated) -> None:
    m.norm.bias = nn.Parameter(m.norm.bias.detach().clone())


def removes_a_bias(m: Gated) -> None:
    m.up.bias = None


def replaces_a_child(m: Gated) -> None:
    m.norm = nn.LayerNorm(4)


def hides_a_child(m: Gated) -> None:
    m.norm = nn.Identity()
    m.other = nn.LayerNorm(4)


def rebinds_a_buffer(m: Gated) -> None:
    m.mask = m.mask * 2


def freezes(m: Gated) -> None:
    m.up.weight.requires_grad_(False)


def changes_the_mode(m: Gated) -> None:
    m.norm.eval()


def changes_a_list(m: Gated) -> None:
    m.scales[1] = 3.0


def rebinds_a_list(m: Gated) -> None:
    m.scales = [1.0, 2.0, 0.0]


def hooks(m: Gated) -> None:
    m.up.register_forward_hook(lambda _m, _args, out: out * 2)


def patches(m: Gated) -> None:
    m.up.forward = lambda x: x  # type: ignore[method-assign]


def changes_a_flag_of_a_layer(m: Gated) -> None:
    m.norm.eps = 1e-3


CHANGES: dict[Callable[[Gated], None], str] = {
    moves_a_weight: "up.weight",
    replaces_a_bias: "norm.bias",
    removes_a_bias: "up.bias",
    replaces_a_child: "norm",
    hides_a_child: "norm",
    rebinds_a_buffer: "mask",
    freezes: "up.weight",
    changes_the_mode: "norm.training",
    changes_a_list: "scales",
    rebinds_a_list: "scales",
    hooks: "up._forward_hooks",
    patches: "up.forward()",
    changes_a_flag_of_a_layer: "norm.eps",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["function", "class"])
def test_state_that_the_original_leaves_alone(entry: ml.Entry, change: Any, kind: str) -> None:
    class Changes(Gated):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            change(self)
            return out

    def changes(module: Gated, x: Tensor) -> Tensor:
        out = Gated.forward(module, x)
        change(module)
        return out

    check = entry.check(Changes if kind == "class" else changes)
    assert check.status is ml.Status.MISMATCH_VALUE
    assert check.reason.startswith(f'state["{CHANGES[change]}"]: changed by the call')
    assert entry.check().status is ml.Status.EXACT


def test_what_the_original_changes_and_what_is_ones_own_may_change(entry: ml.Entry) -> None:
    class Cached(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.ones = None
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(len(x))
            self.ones = torch.ones(4) if self.ones is None else self.ones
            self.scales = list(self.scales)
            self.mask = self.mask.clone()
            self.up.weight.data = self.up.weight.data.clone()
            return super().forward(x)

    assert entry.check(Cached, backward=True).status is ml.Status.EXACT


class Swaps(nn.Module):
    """Replaces a child and a weight in the call itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x) + self.spare(x)
        self.head.bias = nn.Parameter(self.head.bias.detach() + 1)
        self.act = nn.ReLU()
        return self.act(out)


def test_where_the_original_replaces_a_candidate_may(tmp_path: Path) -> None:
    with ml.track_init():
        model = Swaps()
    with ml.trace(model, modules="") as trace:
        model(rows())
    entry = add_unverified(trace, tmp_path / "repo")[0]

    def same(module: Swaps, x: Tensor) -> Tensor:
        return Swaps.forward(module, x)

    def more(module: Swaps, x: Tensor) -> Tensor:
        out = Swaps.forward(module, x)
        module.spare.weight.data = module.spare.weight.data * 2
        return out

    assert entry.check(same).status is ml.Status.EXACT
    assert entry.check(more).status is ml.Status.MISMATCH_VALUE
