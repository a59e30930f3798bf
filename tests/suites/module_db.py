"""torch's own module tests as input: every `ModuleInfo` through trace, add, rebuild and grade.

Knows torch's `module_db` and the public door of ModuleLens. Knows no class of torch by name and
nothing of how a module is rebuilt.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves

import modulelens as ml

ASPECTS = ("outputs", "buffers", "param_grads")
_CHUNK = 200


@dataclasses.dataclass(frozen=True)
class Case:
    """One module with one sample input in one mode."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one module of one case; `levels` has the aspects that there were to grade."""

    case: str
    fqn: str
    cls: str
    calls: int
    with_gradients: bool
    levels: dict[str, str]
    reasons: dict[str, str]

    @property
    def exact(self) -> bool:
        """Whether everything there was to grade is bit-equal."""
        return bool(self.levels) and set(self.levels.values()) == {"exact"}


def cases(samples: int | None = None) -> Iterator[Case]:
    """A fresh module and inputs per case; at most `samples` per `ModuleInfo` and mode."""
    for info in module_db:
        for training in (True, False):
            torch.manual_seed(0)
            inputs = _inputs(info, training)
            for index in _spread(len(inputs), samples):
                yield _case(info, inputs[index], training, index)


def _inputs(info: ModuleInfo, training: bool) -> list[ModuleInput]:
    given = info.module_inputs_func(
        info, device="cpu", dtype=_dtype(info), requires_grad=True, training=training
    )
    return list(given)


def _dtype(info: ModuleInfo) -> torch.dtype:
    return torch.float32 if torch.float32 in info.dtypes else torch.float64


def _spread(count: int, most: int | None) -> list[int]:
    """`most` numbers below `count`, evenly spaced."""
    if most is None or count <= most:
        return list(range(count))
    return [i * count // most for i in range(most)]


def _case(info: ModuleInfo, sample: ModuleInput, training: bool, index: int) -> Case:
    made = sample.constructor_input
    module = info.module_cls(*made.args, **made.kwargs).to(_dtype(info)).train(training)
    forward = sample.forward_input
    name = f"{info.name}.{'train' if training else 'eval'}.{index}"
    return Case(name, module, tuple(forward.args), dict(forward.kwargs))


def traced(case: Case) -> ml.Trace:
    """The case's trace: one forward, and a backward where an output asks for it."""
    with ml.trace(case.module, name=case.name, keep=ml.Keep(grads=True)) as trace:
        outputs = [o for o in tree_leaves(case.module(*case.args, **case.kwargs)) if _counts(o)]
        if outputs:
            torch.stack([(o * _weight(o)).sum() for o in outputs]).sum().backward()
    return trace


def _counts(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _weight(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)


def sweep(repo: ml.Repo, given: Iterable[Case]) -> list[Row]:
    """Every case traced, stored, rebuilt in the worker process and graded."""
    rows: list[Row] = []
    entries: list[ml.Entry] = []
    with warnings.catch_warnings(), ml.track_init():
        # torch warns about its own samples; the repo warns of what is graded below.
        warnings.simplefilter("ignore")
        for case in given:
            trace = traced(case)
            rows += _lost(case.name, trace)
            if trace.captures:
                entries += repo.add(trace, verify=False)
        repo.verify(entries)
    return rows + [_row(entry) for entry in entries]


def _lost(case: str, trace: ml.Trace) -> list[Row]:
    """Modules that were called and could not be recorded; those never called are no loss."""
    return [
        Row(case, c.fqn, c.cls, 0, False, {"outputs": "no"}, {"outputs": f"refused: {c.reason}"})
        for c in trace.coverage
        if c.fate.value == "refused"
    ]


def _row(entry: ml.Entry) -> Row:
    grade = entry.grade
    assert grade is not None, entry
    levels = {a: level.value for a in ASPECTS if (level := getattr(grade, a)) is not None}
    reasons = {a: ": ".join(r) for a, r in grade.reasons.items()}
    calls, gradients = entry.metadata.calls, bool(entry.metadata.param_grads)
    return Row(entry.model, entry.fqn, entry.cls, len(calls), gradients, levels, reasons)


def shares(rows: list[Row]) -> dict[str, tuple[int, int]]:
    """Aspect -> (graded exact, graded); "all" counts modules, exact in every aspect."""
    found = {
        aspect: (
            sum(row.levels.get(aspect) == "exact" for row in rows),
            sum(aspect in row.levels for row in rows),
        )
        for aspect in ASPECTS
    }
    return {"all": (sum(row.exact for row in rows), len(rows)), **found}


def named(rows: list[Row]) -> list[tuple[str, str, int]]:
    """(class, aspect and reason, how many) of everything that is not exact or was not graded."""
    counted: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for aspect, reason in row.reasons.items():
            counted[row.cls.partition(":")[2], f"{aspect}: {reason}"] += 1
    return [(cls, reason, count) for (cls, reason), count in counted.most_common()]
