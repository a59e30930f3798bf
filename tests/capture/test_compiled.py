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


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def outer(model: nn.Module, backend: Counting) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def in_place(model: nn.Module, backend: Counting) -> nn.Module:
    model.compile(backend=backend)
    return model


def child(model: Whole, backend: Counting) -> nn.Module:
    model.body = torch.compile(model.body, backend=backend)  # type: ignore[assignment]
    return model


def child_in_place(model: Whole, backend: Counting) -> nn.Module:
    model.body.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled_by", [outer, in_place, child, child_in_place])
def test_a_compiled_model_is_captured_whole_and_stays_compiled(
    compiled_by: Callable[[nn.Module, Counting], nn.Module], tmp_path: Path
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Counting()
    model = compiled_by(Whole(), backend)
    plain = hooks_of(model)
    expected = model(rows())
    counts = backend.compiled, backend.ran
    assert counts[0] >= 1

    with ml.trace(model, name="compiled", keep=ml.Keep(grads=True)) as trace:
        seen = model(rows())
        seen.sum().backward()
    assert torch.equal(seen, expected)
    assert (backend.compiled, backend.ran) == counts
    assert {p.grad is not None for p in model.parameters()} == {True}
    assert sorted(c.fqn for c in trace.captures) == ["", "body", "body.act", "body.layer", "head"]
    assert hooks_of(model) == plain

    assert torch.equal(model(rows()), expected)
    assert backend.compiled == counts[0]
    assert backend.ran > counts[1]
    assert any("ran eagerly" in warning for warning in trace.warnings)
    entries = graded(trace, tmp_path / "repo")
    assert {fqn: faults(e.grade) for fqn, e in entries.items()} == dict.fromkeys(entries, "")


def test_a_trace_before_the_first_compilation_does_not_spoil_it() -> None:
    torch._dynamo.reset()
    backend = Counting()
    model = outer(Body(), backend)
    with ml.trace(model) as trace:
        model(rows())
    assert len(trace.captures) == 3
    assert any("ran eagerly" in warning for warning in trace.warnings)
    model(rows())
    assert (backend.compiled, backend.ran) == (1, 1)


def test_a_function_compiled_around_the_model_goes_on_being_compiled() -> None:
    torch._dynamo.reset()
    backend, model = Counting(), Body()
    step = torch.compile(lambda x: model(x) * 2, backend=backend)
    expected = step(rows())
    counts = backend.compiled, backend.ran
    hint = "is it called through a compiled wrapper"
    with pytest.warns(UserWarning, match=hint), ml.trace(model) as trace:
        assert torch.equal(step(rows()), expected)
    ran = backend.ran
    assert torch.equal(step(rows()), expected)
    assert backend.ran > ran
    assert counts[0] >= 1
    assert not trace.captures


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_inner_model_of_a_compiled_one_is_left_alone(warm: bool, fullgraph: bool) -> None:
    torch._dynamo.reset()
    backend, model = Counting(), Whole()
    expected = model(rows())
    step = torch.compile(model, backend=backend, fullgraph=fullgraph)
    if warm:
        step(rows())
    hint = "is it called through a compiled wrapper"
    with pytest.warns(UserWarning, match=hint), ml.trace(model) as trace:
        assert torch.equal(step(rows()), expected)
    assert torch.equal(step(rows()), expected)
    assert backend.ran >= 2
    assert not trace.captures
