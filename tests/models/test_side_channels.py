"""Gradients that reach a weight past its module's outputs are no fault of the module's code."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import modulelens as ml


class Lends(nn.Module):
    """Calls its part, and uses the part's weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + x @ self.part.weight


def test_check_says_of_unedited_code_what_verification_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Lends()
    with ml.trace(model, name="m", keep=ml.Keep(grads=True)) as trace:
        model(torch.randn(3, 4)).sum().backward()
    entries = {e.fqn: e for e in ml.Repo(tmp_path / "repo").add(trace)}
    part = entries["part"]
    assert part.grade is not None
    assert part.grade.reasons["param_grads"][0] == "gradient_side_channel"
    check = part.check(backward=True)
    assert check.status is ml.Status.EXACT
    assert any("not compared" in text for text in check.warnings)
    assert entries[""].check(backward=True).status is ml.Status.EXACT
    assert not part.check(lambda module, x: module(x) * 2, backward=True)
