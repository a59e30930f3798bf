"""Outputs that are one tensor in the original and two in the candidate, or the other way round."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.loop import add_unverified, rows
from torch import Tensor, nn

import modulelens as ml


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class SharedInFront(Heads):
    def forward(self, x: Tensor) -> Any:
        y, z = self.parts(x)
        return {"main": y, "again": [y, y[1:]], "other": z, "input": x}


class ClonedInFront(Heads):
    def forward(self, x: Tensor) -> Any:
        y, z = self.parts(x)
        return {"main": y, "again": [y.clone(), y[1:]], "other": z, "input": x}


class ClonedTwice(Heads):
    def forward(self, x: Tensor) -> Any:
        y, z = self.parts(x)
        return {"main": y, "again": [y * 1, y[1:] + 0], "other": z.clone(), "input": x}


def of(kind: type[nn.Module], repo: Path) -> ml.Entry:
    torch.manual_seed(0)
    with ml.track_init():
        model = nn.Sequential(nn.Linear(4, 4), kind())
    with ml.trace(model, modules="1", keep=ml.Keep(grads=True)) as trace:
        out = model(rows())
        parts = out["main"], *out["again"], out["other"], out["input"]
        sum((i + 1) * part.square().sum() for i, part in enumerate(parts)).backward()
    return add_unverified(trace, repo)[0]


KINDS = (SharedInFront, ClonedInFront, ClonedTwice)


@pytest.mark.parametrize(("original", "candidate"), list(itertools.product(KINDS, KINDS)))
def test_gradients_go_to_what_stands_in_the_same_place(
    original: type[Heads], candidate: type[Heads], tmp_path: Path
) -> None:
    entry = of(original, tmp_path / "repo")
    check = entry.check(candidate, backward=True)
    assert check.status.passed, check
    assert any(leaf.path == 'grad["b.weight"]' for leaf in check.leaves)

    class Detached(candidate):  # type: ignore[misc, valid-type]
        def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, z = super().parts(x)
            return y + 0 * x.sum(), z + (z * 0.5).detach() - 0.5 * z

    assert not entry.check(Detached, backward=True)


def test_an_output_dict_has_an_order(tmp_path: Path) -> None:
    entry = of(SharedInFront, tmp_path / "repo")

    def turned(module: Heads, x: Tensor) -> Any:
        return dict(sorted(SharedInFront.forward(module, x).items()))

    check = entry.check(turned)
    assert check.status is ml.Status.MISMATCH_STRUCTURE
    assert "output: expected keys in the order ['main', 'again', 'other'" in check.reason
    assert entry.check().status is ml.Status.EXACT
