"""Compiled models are seen as eager ones in the traced step, and are compiled again after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.capture.loop import faults, graded, hooks_of, rows
from torch import nn

import modulelens as ml

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Counting:
    """A compiler that runs graphs as they are, and counts compilations and runs."""

    def __init__(self) -> None:
        self.compiled = 0
        self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        self.compiled += 1

        def run(*args: object) -> object:
            self.ran += 1
            return graph.forward(*args)

        return run


def outer(model: nn.Module, backend: Counting) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def in_place(model: nn.Module, backend: Counting) -> nn.Module:
    model.compile(backend=backend)
    return model


def child(model: nn.Module, backend: Counting) -> nn.Module:
    model[0] = torch.compile(model[0], backend=backend)  # type: ignore[operator,index]
    return model


def child_in_place(model: nn.Module, backend: Counting) -> nn.Module:
    model[0].compile(backend=backend)  # type: ignore[operator,index]
    return model


@pytest.mark.parametrize("compiled_by", [outer, in_place, child, child_in_place])
def test_a_compiled_model_is_captured_whole_and_stays_compiled(
    compiled_by: Callable[[nn.Module, Counting], nn.Module], tmp_path: Path
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Counting()
    body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = compiled_by(nn.Sequential(body, nn.Linear(4, 4)), backend)
    plain = hooks_of(model)
    expected = model(rows())
    counts = backend.compiled, backend.ran
    assert counts[0] >= 1

    with ml.trace(model, name="compiled") as trace:
        seen = model(rows())
    assert torch.equal(seen, expected)
    assert (backend.compiled, backend.ran) == counts
    assert {c.fqn for c in trace.captures} == {"", "0", "0.0", "0.1", "1"}
    assert hooks_of(model) == plain

    assert torch.equal(model(rows()), expected)
    assert backend.compiled == counts[0]
    assert backend.ran > counts[1]
    entries = graded(trace, tmp_path / "repo")
    assert not any(faults(e.grade) for e in entries.values())


def test_a_trace_before_the_first_compilation_does_not_spoil_it() -> None:
    torch._dynamo.reset()
    backend = Counting()
    model = outer(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend)
    with ml.trace(model) as trace:
        model(rows())
    assert len(trace.captures) == 3
    model(rows())
    assert (backend.compiled, backend.ran) == (1, 1)
