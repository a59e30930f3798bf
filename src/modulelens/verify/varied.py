"""Original and candidate on values that no capture holds: who repeats what it saw is found out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modulelens.measure.anchor import float64_run
from modulelens.measure.compare import compare, verdict
from modulelens.measure.run import Run
from modulelens.measure.untouched import untouched
from modulelens.measure.vary import scaled, shifted, vary
from modulelens.records import LeafCheck, Status
from modulelens.tree import distinct, flatten
from modulelens.verify.subject import Subject
from modulelens.verify.trial import forward

_PATH = "varied.output"
FIXED = "only the captured values were compared: on others the original fails"


def varied(subject: Subject, call: int) -> tuple[list[LeafCheck], list[str]]:
    """Compares both on a call's inputs with other values, and with other weights.

    Each runs on the captured ones first, and has what it kept of them. A candidate that is no
    class and takes no `module` computes with weights of its own; those stay, and so do the
    original's.

    Returns:
        The leaves that differ, and what weakens that there are none.
    """
    original = subject.original
    ready, place = original.ready(call), subject.replay.ready(call)
    other = subject.run(place, call)
    shared = other.owner is place.module
    weights = dict(ready.module.named_parameters()) if shared else {}
    for name in original.metadata.table_rows:  # mostly rows that take no memory: let them be
        weights.pop(name, None)
    theirs = {n: p for n, p in place.module.named_parameters() if _alike(p, weights.get(n))}
    # The candidate first: in freed memory it finds no result of the original.
    trial = forward(_second(other, theirs))
    reference = _second(ready.run, weights)
    wanted = forward(reference)
    captured = original.value(original.call(call).output)
    if wanted.failure or _infinite(wanted.output) > _infinite(captured):
        return [], [f"{FIXED}: {wanted.failure or 'its output is not finite'}"]
    if trial.failure:
        failed = LeafCheck(path=_PATH, status=Status.RUNTIME_ERROR, message=trial.failure)
        return [failed], []
    leaves = compare(wanted.output, trial.output, path=_PATH)
    if verdict(leaves).status is not Status.EXACT:  # else no anchor is needed
        anchor = anchored(reference)
        leaves = compare(wanted.output, trial.output, path=_PATH, anchor=anchor, same_code=False)
    same = verdict(compare(captured, wanted.output)).status is Status.EXACT
    weak = ["there are no other values, or the original gives the same for them"] if same else []
    return [leaf for leaf in leaves if not leaf.status.passed], weak


def anchored(run: Run) -> Any:
    """What the run gives in float64; None where that is not possible."""
    twin, _ = float64_run(run)
    return None if twin is None else forward(twin).output


def _second(run: Run, weights: Mapping[str, Tensor]) -> Run:
    """Runs it, then gives its inputs and the same module other values, as an optimizer does."""
    forward(run)
    with untouched:
        vary(flatten((run.args, run.kwargs)).named, scaled)
        vary(weights, shifted)
    return dataclasses.replace(run)  # starts from what is there now


def _alike(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and other.shape == tensor.shape


@untouched
def _infinite(value: Any) -> int:
    numbers = (distinct(t) for t in flatten(value).tensors if t.is_floating_point())
    return sum(int((~t.isfinite()).sum()) for t in numbers if not t.is_meta)
