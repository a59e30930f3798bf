"""Grades hold in a new process, and gradients of tied parameters are added up under each name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.rebuild.registered import (
    Holder,
    HooksActivation,
    SideChannel,
    TiedInside,
    WritesToOutput,
)

import modulelens as ml
from modulelens.entry import _import_path
from modulelens.measure.worker import Worker
from modulelens.records import GradeLevel


def traced(model: torch.nn.Module, width: int) -> ml.Trace:
    torch.manual_seed(0)
    with ml.trace(model, keep=ml.Keep(grads=True)) as trace:
        model(torch.randn(2, width)).sum().backward()
    return trace


def test_what_a_constructor_left_behind_flatters_no_grade(tmp_path: Path) -> None:
    with ml.track_init():
        model = Holder()
    entries = ml.Repo(tmp_path / "repo").add(traced(model, 3))
    assert [e.grade.level for e in entries] == [GradeLevel.EXACT] * 2
    assert [e.grade.strategy for e in entries] == ["init"] * 2
    with Worker(path=_import_path()) as worker:
        for entry in entries:
            task = {"call": None, "backward": True, "candidate": None, **entry._address()}
            assert worker.call("tests.rebuild.test_grading:check_alone", task) == "EXACT"


def check_alone(*, repo: str, entry: str, **_: object) -> str:
    return ml.Repo(repo)[entry].check(backward=True).status.value


@pytest.mark.parametrize("tracked", [True, False])
def test_tied_parameters_and_closures_as_hooks(tmp_path: Path, tracked: bool) -> None:
    tracking = ml.track_init()
    if not tracked:
        tracking.stop()
    model = TiedInside()
    tracking.stop()
    entries = ml.Repo(tmp_path / "repo").add(traced(model, 4))
    root = entries[0]
    assert root.grade.level is GradeLevel.EXACT, root.grade.reasons
    assert root.grade.param_grads is GradeLevel.EXACT, root.grade.reasons
    module = root.rebuild()
    assert module.first.weight is module.second.weight
    assert set(root.grads()["parameters"]) == {"first.weight", "second.weight"}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (WritesToOutput, "output_modified_by_caller"),
        (SideChannel, "gradient_side_channel"),
        (HooksActivation, None),
    ],
)
def test_gradients_that_do_not_come_through_the_outputs_are_named(
    model: type[torch.nn.Module], reason: str | None, tmp_path: Path
) -> None:
    entries = {e.fqn: e for e in ml.Repo(tmp_path / "repo").add(traced(model(), 4))}
    assert all(e.grade.level is GradeLevel.EXACT for e in entries.values())
    assert entries[""].grade.param_grads is GradeLevel.EXACT
    found = entries["inner"].grade
    assert found.reasons.get("param_grads", (None, ""))[0] == reason, found.reasons
    assert (found.param_grads is GradeLevel.EXACT) == (reason is None)
