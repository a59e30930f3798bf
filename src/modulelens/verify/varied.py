"""Original and candidate on values that no capture holds: who repeats what it saw is found out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from modulelens.measure.anchor import float64_run
from modulelens.measure.compare import compare, verdict
from modulelens.measure.run import Run
from modulelens.measure.vary import scaled, shifted, vary
from modulelens.records import LeafCheck, Status
from modulelens.replay import Replay, Replayed
from modulelens.tree import distinct, flatten
from modulelens.verify.trial import WithModule, bind, forward

Function = Callable[..., Any]
_PATH = "varied.output"
FIXED = "only the captured values were compared: on others the original fails"


def varied(
    original: Replay, other: Replay, candidate: Function | None, call: int
) -> tuple[list[LeafCheck], list[str]]:
    """Compares both on a call's inputs with other values, and with other weights.

    A candidate that is no class and takes no `module` computes with weights of its own; those
    stay, and so do the original's.

    Args:
        original: The entry with the code that was captured.
        other: The entry with the candidate's class in the captured one's place, or the same.
        candidate: A module or function; None: what `other` rebuilds.
        call: Whose inputs.

    Returns:
        The leaves that differ, and what weakens that there are none.
    """
    ready, place = original.ready(call), other.ready(call)
    function = place.module if candidate is None else bind(candidate, place.module)
    shared = candidate is None or isinstance(getattr(function, "__self__", None), WithModule)
    weights = dict(ready.module.named_parameters()) if shared else {}
    for name in original.metadata.table_rows:  # mostly rows that take no memory: let them be
        weights.pop(name, None)
    theirs = {n: p for n, p in place.module.named_parameters() if _alike(p, weights.get(n))}
    reference = _run(original, ready, ready.module, call, weights)
    # The candidate first: in freed memory it finds no result of the original.
    trial = forward(_run(other, place, function, call, theirs))
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


def _run(
    replay: Replay, ready: Replayed, function: Function, call: int, weights: Mapping[str, Tensor]
) -> Run:
    inputs = ready.run.args, ready.run.kwargs
    flat = flatten(inputs)
    vary(dict(zip(flat.paths, flat.tensors, strict=True)), scaled)
    vary(weights, shifted)
    return replay.run(function, call, inputs)


def _alike(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and other.shape == tensor.shape


def _infinite(value: Any) -> int:
    numbers = (distinct(t) for t in flatten(value).tensors if t.is_floating_point())
    return sum(int((~t.isfinite()).sum()) for t in numbers if not t.is_meta)
