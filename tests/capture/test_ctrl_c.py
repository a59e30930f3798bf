"""Ctrl-C at any moment of a trace, also while a hook of it runs, leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.capture import zoo
from tests.capture.loop import Case, build, hooks_of, rows, train_step
from tests.capture.test_interrupted import installed
from torch import nn

import modulelens as ml
from modulelens import capture

_OWN = str(Path(capture.__file__).parent)


class Interrupting:
    """Raises KeyboardInterrupt at the n-th line that the tracer's own code runs, as a signal would.

    Counts only, where `at` is negative.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0
        self.place = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        # The first line of these comes before anything that could hold an interrupt back.
        if not code.co_filename.startswith(_OWN) or code.co_name in ("__exit__", "finish"):
            return None
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.at:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> Interrupting:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


class Mixed(nn.Module):
    """A child with a hook of its own, one called twice, one that is compiled by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked, self.twice = nn.Linear(4, 4), zoo.CalledTwice()
        self.hooked.register_forward_pre_hook(zoo.add_one_before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.hooked(x))


CASE = Case(Mixed)


def traced_step(model: nn.Module, interrupting: Interrupting) -> None:
    with interrupting, ml.trace(model, keep=ml.Keep(grads=True), steps=2):
        for _ in range(2):
            train_step(CASE, model)


def lines_of_a_step() -> int:
    counting = Interrupting(-1)
    traced_step(build(CASE), counting)
    return counting.lines


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.floats(0, 1, exclude_max=True))
def test_an_interrupt_in_the_tracers_own_code(part: float) -> None:
    _interrupt_at(int(part * LINES))


LINES = lines_of_a_step()


def _interrupt_at(line: int) -> None:
    model, before = build(CASE), installed()
    plain = hooks_of(model)
    interrupting = Interrupting(line)
    try:
        traced_step(model, interrupting)
    except KeyboardInterrupt:
        pass
    else:
        assert not interrupting.place, f"the interrupt at {interrupting.place} was swallowed"
    assert hooks_of(model) == plain, interrupting.place
    assert installed() == before, interrupting.place
    assert all(not p._backward_hooks for p in model.parameters()), interrupting.place
    with ml.trace(model) as again:
        model(rows())
    assert len(again.captures) == 5, interrupting.place
