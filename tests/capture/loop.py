"""One step of a tiny model, run plain and traced; what it leaves behind; and its entries, graded.

Knows a case as a model and a step. Grading starts a process, so it is done for many cases at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import modulelens as ml
from modulelens.records import Grade, GradeLevel
from modulelens.tree import tensors_of
from modulelens.verify import grade_init, grade_structure

LAZY = nn.parameter.UninitializedParameter
Forward = Callable[[nn.Module], Any]


def rows(n: int = 3, width: int = 4) -> Tensor:
    """An input that is the same each time."""
    return torch.arange(n * width, dtype=torch.float32).reshape(n, width).div(7).sin()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a forward of it.

    `spoiled` maps an fqn to the reason why it isn't exact; for those in `ungraded` no gradient of
    an output was kept, so that those of its parameters are not graded.
    """

    build: Callable[[], nn.Module]
    forward: Forward = lambda model: model(rows())
    train: bool = True
    learn: bool = True
    warmup: int = 0
    track: bool = True
    spoiled: dict[str, str] = dataclasses.field(default_factory=dict)
    ungraded: tuple[str, ...] = ()


@dataclasses.dataclass
class Left:
    """All that a step leaves behind."""

    output: Any
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    streams: tuple[Any, ...]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def streams() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2:], random.getstate()


def build(case: Case) -> nn.Module:
    """The case's model, with the same weights each time."""
    seed_all(0)
    with ml.track_init() if case.track else contextlib.nullcontext():
        return case.build().train(case.train)


def train_step(case: Case, model: nn.Module) -> Any:
    """Forward, and backward with an optimizer's step of lr 1 where the case learns."""
    output = case.forward(model)
    losses = [t.float().square().mean() for t in tensors_of(output) if t.requires_grad]
    if case.learn:
        parameters = [p for p in model.parameters() if not isinstance(p, LAZY)]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        sum(losses, start=torch.zeros(())).backward()
        optimizer.step()
    return output


def run(case: Case, model: nn.Module, trace: ml.Trace | None = None) -> Left:
    """Warm-up steps and one more, within `trace` if there is one."""
    seed_all(1)
    with trace or contextlib.nullcontext():
        for _ in range(case.warmup + 1):
            model.zero_grad()
            output = train_step(case, model)
    return Left(
        [t.detach().clone() for t in tensors_of(output)],
        {name: p.grad for name, p in model.named_parameters()},
        {n: t.detach().clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)},
        streams(),
    )


def same(left: Any, right: Any) -> bool:
    """Equality of nested values; tensors bit by bit, NaN equal to NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
            return False
        if left.is_sparse or left.is_nested:
            return all(map(same, tensors_of([left]), tensors_of([right])))
        plain = [t.detach().resolve_conj().contiguous().reshape(-1) for t in (left, right)]
        return torch.equal(*[t.view(torch.uint8) for t in plain]) if left.numel() else True
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def hooks_of(model: nn.Module) -> dict[str, int]:
    """Number of hooks per module and kind, and of global ones."""
    found = {
        f"{fqn}.{name}": len(value)
        for fqn, module in model.named_modules()
        for name, value in vars(module).items()
        if "hooks" in name and value
    }
    kinds = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks")
    found |= {kind: len(getattr(nn.modules.module, kind)) for kind in kinds}
    return {name: count for name, count in found.items() if count}


def add_unverified(trace: ml.Trace, repo: Path, name: str = "") -> list[ml.Entry]:
    trace.name = name or trace.name
    return ml.Repo(repo).add(trace, verify=False)


def verify(repo: Path, entries: Iterable[ml.Entry]) -> None:
    """Grades all of them in one worker."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot be rebuilt exactly")
        ml.Repo(repo).verify(list(entries))


def graded(trace: ml.Trace, repo: Path) -> dict[str, ml.Entry]:
    """The trace's entries by fqn, graded in this process: a worker takes seconds to start."""
    entries = add_unverified(trace, repo)
    for entry in entries:
        grade, more = grade_structure(entry._replay())
        entry._note(grade=grade_init(entry._replay(), grade) if more else grade)
    return {entry.fqn: entry for entry in entries}


def faults(grade: Grade | None) -> str:
    """Empty when every aspect is exact or has nothing to grade; else the reasons."""
    assert grade is not None
    aspects = ("outputs", "buffers", "param_grads", "input_grads")
    wrong = [a for a in aspects if getattr(grade, a) not in (None, GradeLevel.EXACT)]
    return "; ".join(f"{a}: {grade.reasons.get(a)}" for a in wrong)
