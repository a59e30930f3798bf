"""A real model's step, run plain and traced, stored, and graded in another process.

Knows a case as a model and a step; knows no library of models.
"""

from __future__ import annotations

import collections
import contextlib
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
    """A model and a step of it; the step returns the loss, or the output where nothing trains.

    `steps` are run; `warmup` forwards pass before the one that is traced. The step number `eager`
    of a compiled model runs eagerly also without a trace, as it does under one.
    """

    name: str
    build: Callable[[], nn.Module]
    step: Step
    train: bool = True
    steps: int = 1
    warmup: int = 0
    eager: int = -1


@dataclasses.dataclass
class Outcome:
    """All that a step computes and leaves behind."""

    result: Tensor
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    random: Tensor


@dataclasses.dataclass
class Report:
    """One case, traced and graded; pairs are of the plain and the traced run. Seconds.

    `steady`: two plain runs are equal; without that, tracing cannot be told from chance.
    """

    case: Case
    models: tuple[nn.Module, nn.Module]
    coverage: list[Coverage]
    entries: list[ml.Entry]
    outcomes: tuple[Outcome, Outcome]
    steady: bool
    leftovers: list[str]
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
    # A model with integer weights has nothing to learn.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if case.train else None
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with trace or torch.enable_grad():
        for number in range(case.steps):
            eager = number == case.eager and trace is None
            with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
                result = case.step(model)
            if optimizer is not None:
                optimizer.zero_grad()
                result.backward()
                optimizer.step()
    return Outcome(
        result.detach().clone(),
        {name: p.grad for name, p in model.named_parameters()},
        {name: p.detach().clone() for name, p in model.named_parameters()},
        torch.get_rng_state(),
    )


def observe(
    case: Case, repo: ml.Repo, *, first: Outcome | None = None, verify: bool = True
) -> Report:
    """Runs the step plain and traced, stores the trace, and grades every entry in a worker.

    `first` is a run that was made before: first calls import and allocate.
    """
    plain_model, model = build(case), build(case)
    first = first or run_step(case, build(case))
    start = time.perf_counter()
    plain = run_step(case, plain_model)
    plain_s = time.perf_counter() - start
    trace = ml.trace(model, name=case.name, warmup=case.warmup, keep=ml.Keep(grads=True))
    start = time.perf_counter()
    traced = run_step(case, model, trace)
    traced_s = time.perf_counter() - start
    assert trace.captures, (case.name, trace.warnings)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot be rebuilt exactly")
        entries = repo.add(trace, verify=verify)
    add_s = time.perf_counter() - start
    report = Report(
        case=case,
        models=(plain_model, model),
        coverage=trace.coverage,
        entries=entries,
        outcomes=(plain, traced),
        steady=not differences(first, plain),
        leftovers=_leftovers(plain_model, model),
        plain_s=plain_s,
        traced_s=traced_s,
        add_s=add_s,
    )
    again = differences(run_step(case, build(case)), plain) if report.steady else []
    report.leftovers += [f"a later step has other bits: {name}" for name in again]
    return report


def _leftovers(untouched: nn.Module, traced: nn.Module) -> list[str]:
    """What a trace left on the modules or in torch, beside a model that was never traced."""
    found = []
    for plain, module in zip(untouched.modules(), traced.modules(), strict=True):
        extra = vars(module).keys() ^ vars(plain).keys()
        found += [f"{type(module).__name__}.{name}" for name in sorted(extra)]
        for name, value in vars(plain).items():
            if (
                "hooks" in name
                and isinstance(value, dict)
                and len(vars(module)[name]) != len(value)
            ):
                found.append(f"{type(module).__name__}.{name}")
    every = nn.modules.module
    return found + ["hooks of all modules"] * bool(
        every._global_forward_pre_hooks or every._global_forward_hooks
    )


def observe_all(cases: Sequence[Case], repo: ml.Repo) -> dict[str, Report]:
    """Observes many cases; one worker process grades all their entries."""
    with ml.track_init():
        reports = {case.name: observe(case, repo, verify=False) for case in cases}
    repo.verify([entry for report in reports.values() for entry in report.entries])
    return reports


def differences(left: Outcome, right: Outcome) -> list[str]:
    """What two runs do not share bit for bit."""
    pairs = {"result": (left.result, right.result), "random": (left.random, right.random)}
    for kind in ("gradients", "parameters"):
        mine, other = getattr(left, kind), getattr(right, kind)
        pairs |= {f"{kind}: {name}": (mine[name], other[name]) for name in mine}
    return [name for name, pair in pairs.items() if not _same_bits(*pair)]


def _same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and torch.equal(*(_bytes(side) for side in (left, right)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_undisturbed(report: Report) -> None:
    """The traced step computed, bit for bit, what the plain one did."""
    assert report.steady, "the model's own steps differ from one another"
    assert not differences(*report.outcomes)


def assert_faithful(report: Report, share: float = 0.98) -> None:
    """Every module has a fate; what was recorded is exact or says by name why it isn't."""
    model = getattr(report.models[1], "_orig_mod", report.models[1])
    fqns = [fqn for fqn, _ in model.named_modules()]
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
