"""A real model's step, run plain and traced, stored, and graded in another process.

Knows a case as a model and a step; knows no library of models.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

import modulelens as ml
from modulelens.records import Coverage, Fate, GradeLevel

Step = Callable[[nn.Module], Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and one step of it; the step returns the loss, or the output where nothing trains."""

    name: str
    build: Callable[[], nn.Module]
    step: Step
    train: bool = True


@dataclasses.dataclass
class Outcome:
    """All that a step computes and leaves behind."""

    result: Tensor
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    random_state: Tensor


@dataclasses.dataclass
class Report:
    """One case, traced and graded; pairs are of the plain and the traced run. Seconds."""

    case: Case
    models: tuple[nn.Module, nn.Module]
    coverage: list[Coverage]
    entries: list[ml.Entry]
    outcomes: tuple[Outcome, Outcome]
    plain_s: float
    traced_s: float
    add_s: float

    def count(self, aspect: str = "outputs") -> collections.Counter[str]:
        """Grades of one aspect over the entries; "none" where there is nothing to grade."""
        grades = [getattr(e.grade, aspect) for e in self.entries]
        return collections.Counter("none" if g is None else g.value for g in grades)

    def reasons(self, aspect: str = "outputs") -> dict[str, tuple[str, str]]:
        """fqn -> (reason, text) where that aspect is not exact."""
        found = {e.fqn: e.grade.reasons.get(aspect) for e in self.entries}
        return {fqn: reason for fqn, reason in found.items() if reason}


def build(case: Case) -> nn.Module:
    """The case's model with the same random weights each time."""
    torch.manual_seed(0)
    model = case.build()
    return model.train() if case.train else model.eval()


def run_step(case: Case, model: nn.Module, trace: ml.Trace | None = None) -> Outcome:
    """One training step with the optimizer's, or one forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with trace or torch.enable_grad():
        result = case.step(model)
        if case.train:
            result.backward()
            optimizer.step()
    return Outcome(
        result.detach().clone(),
        {name: p.grad for name, p in model.named_parameters()},
        {name: p.detach().clone() for name, p in model.named_parameters()},
        torch.get_rng_state(),
    )


def observe(case: Case, repo: ml.Repo, *, verify: bool = True) -> Report:
    """Runs the step plain and traced, stores the trace, and grades every entry in a worker."""
    plain_model, model = build(case), build(case)
    run_step(case, build(case))  # first calls import and allocate
    start = time.perf_counter()
    plain = run_step(case, plain_model)
    plain_s = time.perf_counter() - start
    trace = ml.trace(model, name=case.name, modules="*", keep=ml.Keep(grads=True))
    start = time.perf_counter()
    traced = run_step(case, model, trace)
    traced_s = time.perf_counter() - start
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot be rebuilt exactly")
        entries = repo.add(trace, verify=verify)
    add_s = time.perf_counter() - start
    return Report(
        case=case,
        models=(plain_model, model),
        coverage=trace.coverage,
        entries=entries,
        outcomes=(plain, traced),
        plain_s=plain_s,
        traced_s=traced_s,
        add_s=add_s,
    )


def observe_all(cases: Sequence[Case], repo: ml.Repo) -> dict[str, Report]:
    """Observes many cases; one worker process grades all their entries."""
    with ml.track_init():
        reports = {case.name: observe(case, repo, verify=False) for case in cases}
    repo.verify([entry for report in reports.values() for entry in report.entries])
    return reports


def assert_undisturbed(report: Report) -> None:
    """The traced step computed, bit for bit, what the plain one did."""
    plain, traced = report.outcomes
    assert torch.equal(plain.result, traced.result)
    assert torch.equal(plain.random_state, traced.random_state)
    for name, gradient in plain.gradients.items():
        other = traced.gradients[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or torch.equal(gradient, other), name
    for name, parameter in plain.parameters.items():
        assert torch.equal(parameter, traced.parameters[name]), name


def assert_nothing_installed(report: Report) -> None:
    """Hooks are what they are in the model that was never traced."""
    for untouched, module in zip(*(m.modules() for m in report.models), strict=True):
        for name, value in vars(untouched).items():
            if "hooks" in name and isinstance(value, dict):
                assert len(vars(module)[name]) == len(value), (type(module), name)
        assert set(vars(module)) == set(vars(untouched)), type(module)
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
    again = build(report.case)
    assert torch.equal(run_step(report.case, again).result, report.outcomes[0].result)


def assert_faithful(report: Report, share: float = 0.98) -> None:
    """Every module has a fate; what was recorded is exact or says by name why it isn't."""
    fqns = [fqn for fqn, _ in report.models[1].named_modules()]
    assert sorted(c.fqn for c in report.coverage) == sorted(fqns)
    recorded = {c.fqn for c in report.coverage if c.fate is Fate.RECORDED}
    assert recorded == {e.fqn for e in report.entries}
    assert all(c.reason for c in report.coverage if c.fate is not Fate.RECORDED)
    exact = [e for e in report.entries if e.grade.level is GradeLevel.EXACT]
    for entry in report.entries:
        for aspect in ("outputs", "buffers", "param_grads"):
            level = getattr(entry.grade, aspect)
            assert level in (None, GradeLevel.EXACT) or aspect in entry.grade.reasons, entry.fqn
    assert len(exact) >= share * len(report.entries), report.reasons()
