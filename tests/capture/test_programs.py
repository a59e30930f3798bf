"""Whatever a tree and its calls are like: the step stays the same, and each call is a record."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.capture.loop import (
    Case,
    Left,
    add_unverified,
    build,
    faults,
    graded,
    hooks_of,
    rows,
    run,
    same,
    verify,
)
from tests.capture.programs import Plan, make, plans
from torch import nn

import modulelens as ml
from modulelens.records import Coverage, Fate


@contextmanager
def counted() -> Iterator[dict[int, list[int]]]:
    """By id of a module: how often it was called, and how often the call ended."""
    found: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0])
    original: Any = nn.Module.__call__

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found[id(module)][0] += 1
        output = original(module, *args, **kwargs)
        found[id(module)][1] += 1
        return output

    nn.Module.__call__ = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def traced(case: Case) -> tuple[nn.Module, ml.Trace, dict[int, list[int]]]:
    """The model after a traced step that left what an untraced one leaves."""
    untraced = build(case)
    plain = run(case, untraced)
    model = build(case)
    trace = ml.trace(model, name="program", keep=ml.Keep(grads=True, max_calls=64))
    with counted() as counts:
        left = run(case, model, trace)
    for field in dataclasses.fields(Left):
        assert same(getattr(plain, field.name), getattr(left, field.name)), field.name
    assert hooks_of(model) == hooks_of(untraced) == {}
    return model, trace, counts


def assert_told(model: nn.Module, coverage: list[Coverage], counts: dict[int, list[int]]) -> None:
    """Each module has the fate and the number of calls that it had."""
    for fqn, module in model.named_modules():
        called, ended = counts[id(module)]
        found = next(c for c in coverage if c.fqn == fqn)
        assert found.calls == ended, fqn
        expected = Fate.RECORDED if ended else Fate.REFUSED if called else found.fate
        assert found.fate is expected, fqn
        assert found.fate is not Fate.RECORDED or ended, fqn
        assert bool(found.reason) == (found.fate is not Fate.RECORDED), fqn


def wrong(entries: Iterable[ml.Entry]) -> dict[str, str]:
    """What is not exact, by name."""
    found = {e.name: faults(e.grade) for e in entries}
    for entry in entries:
        # A step adds up all uses of a weight one by one, a replay those of each call first.
        if len(entry.metadata.calls) > 1 and found[entry.name].endswith("the order of a sum')"):
            del found[entry.name]
    return {name: fault for name, fault in found.items() if fault}


def own_frames(caught: pytest.ExceptionInfo[BaseException]) -> list[tuple[str, int]]:
    """The frames of the models' code: torch's differ by hooks of any kind."""
    return [
        (e.name, e.lineno) for e in caught.traceback if e.path.name in ("programs.py", "zoo.py")
    ]


def case_of(plan: Plan) -> Case:
    model = make(plan)
    trains = any(p.requires_grad for p in model.parameters()) and model(rows()).requires_grad
    return Case(lambda: make(plan), learn=trains)


def test_any_tree_with_any_calls_is_recorded_as_it_ran(tmp_path: Path) -> None:
    entries: list[ml.Entry] = []
    folders: Callable[[], Path] = iter(tmp_path / f"{i}" for i in range(10_000)).__next__

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(plans(st.booleans()))
    def one(plan: Plan) -> None:
        plan = dataclasses.replace(plan, catches=True)
        model, trace, counts = traced(case_of(plan))
        assert_told(model, trace.coverage, counts)
        here = graded(trace, folders())
        assert wrong(here.values()) == {}
        entries.extend(add_unverified(trace, tmp_path / "all", f"program{len(entries)}"))

    one()
    verify(tmp_path / "all", entries)
    assert wrong(entries) == {}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans(st.just(False)))
def test_an_exception_anywhere_in_the_tree_is_the_users_and_leaves_nothing(plan: Plan) -> None:
    plan = dataclasses.replace(plan, children=(*plan.children, "explodes"))
    plan = dataclasses.replace(plan, script=(*plan.script, ("call", len(plan.children) - 1)))
    case = Case(lambda: make(plan), learn=False)
    model = build(case)
    with pytest.raises(ValueError, match="inside") as plain:
        run(case, build(case))
    trace = ml.trace(model)
    with pytest.raises(ValueError, match="inside") as caught:
        run(case, model, trace)
    assert own_frames(caught) == own_frames(plain)
    assert caught.value.__context__ is None
    assert hooks_of(model) == {}
    assert not trace.captures
    assert {c.fate for c in trace.coverage} == {Fate.NOT_CALLED}
