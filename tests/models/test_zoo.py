"""Real models in every mode: the step stays as it is, and every module comes back."""

from __future__ import annotations

import pytest
from tests.models import harness
from tests.models.zoo.modes import MODES
from tests.models.zoo.registry import FILES, zoo
from tests.models.zoo.subset import RUNS

from modulelens.records import GradeLevel, Reason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
every = pytest.mark.parametrize("report", RUNS, indirect=True)
COMPARED = {
    # The embedding and the head are one parameter, and neither place sees the whole gradient.
    Reason.SHARED_PARAMETER,
    # Calls of a checkpointed region run without grad first.
    Reason.NOT_KEPT,
}
APART = {
    # A router's logits reach the auxiliary loss through a hook, not through any output.
    "mixtral": Reason.GRADIENT_SIDE_CHANNEL,
    # What its layers collected reaches the loss past them.
    "collector": Reason.GRADIENT_SIDE_CHANNEL,
    # Its caller masks the projection's output in place.
    "wav2vec2": Reason.OUTPUT_MODIFIED_BY_CALLER,
    # Its calls add up in bfloat16, and all calls after one another in the order of the step.
    "cells": Reason.MISMATCH,
}


@every
def test_the_step_is_undisturbed(report: harness.Report) -> None:
    harness.assert_undisturbed(report)


@every
def test_nothing_stays_installed(report: harness.Report) -> None:
    assert not report.leftovers


@every
def test_every_module_is_exact(report: harness.Report) -> None:
    lazy = {"lstm, train": 1, "top-k-pool, bf16": 1}.get(report.case.name, 0)
    reasons = [code for code, _ in report.reasons().values()]
    assert reasons == [Reason.UNINITIALIZED.value] * lazy  # what holds a lazy layer, at first
    harness.assert_faithful(report, share=1 - lazy / len(report.entries))
    assert set(report.count("buffers")) <= {"exact", "none"}


@every
def test_gradients_are_exact_or_say_why(report: harness.Report) -> None:
    model = report.case.name.split(",")[0]
    reasons = {Reason(code) for code, _ in report.reasons("param_grads").values()}
    assert reasons <= COMPARED | ({APART[model]} if model in APART else set())
    if report.case.train:
        assert report.count("param_grads")["exact"] > 0.4 * len(report.entries)
        assert report.count("param_grads")["no"] == sum(
            code in APART.values() and code != Reason.MISMATCH
            for code, _ in report.reasons("param_grads").values()
        )
    else:
        assert set(report.count("param_grads")) == {"none"}


def test_a_compiled_model_is_seen_while_it_runs_eagerly(reports: dict[str, harness.Report]) -> None:
    for model in ("llama", "bert"):
        calls = {c.fqn: c.calls for c in reports[f"{model}, train"].coverage}
        assert {c.fqn: c.calls for c in reports[f"{model}, compile"].coverage} == calls


def test_hooks_that_an_earlier_step_installed_come_back(reports: dict[str, harness.Report]) -> None:
    # Hidden states are collected by hooks, which the first of the compiled steps installed.
    root = next(entry for entry in reports["bert, compile"].entries if entry.fqn == "")
    assert root.grade.level is GradeLevel.EXACT
    assert len(root.outputs()["hidden_states"]) == 3
    assert any(module._forward_hooks for module in root.rebuild().modules())


def test_the_zoo_names_every_model_once() -> None:
    architectures, missing = zoo()
    names = [one.name for one in architectures]
    assert len(names) == len(set(names))
    assert not set(missing) - set(FILES)
    for one in architectures:
        assert set(one.without) <= set(MODES), one.name
        assert all(one.without.values()), one.name
