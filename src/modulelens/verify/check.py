"""Does a candidate, or the rebuilt module, compute what was captured? One verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modulelens.errors import ModuleLensError, NotRebuildable
from modulelens.measure.anchor import float64_run
from modulelens.measure.compare import compare, doubts, verdict
from modulelens.records import Check, Status
from modulelens.replay import Replay
from modulelens.verify.trial import attempt, bind, gradient_leaves


def check(
    replay: Replay,
    candidate: Callable[..., Any] | None = None,
    *,
    call: int | None = None,
    backward: bool = False,
    name: str = "",
    reference: Replay | None = None,
) -> Check:
    """Compares a run with what was captured.

    Args:
        replay: The entry.
        candidate: A module or callable that takes the module's arguments; None: the module as
            rebuilt with today's code.
        call: One call; None: all that were kept.
        backward: Compare gradients as well.
        name: What the candidate is called in the verdict.
        reference: The entry with the code that was captured, where `replay` has an edited class.
    """
    original = reference or replay
    calls = range(len(replay.metadata.calls)) if call is None else [call]
    checks = [_check_call(replay, original, candidate, number, backward, name) for number in calls]
    return max(checks, key=lambda c: list(Status).index(c.status))


def _check_call(
    replay: Replay, original: Replay, candidate: Any, call: int, backward: bool, name: str
) -> Check:
    record = replay.call(call)
    same = (
        candidate is None and not replay.drifted and replay.device == "cpu" and _same_torch(replay)
    )
    try:
        ready = replay.ready(call)
    except ModuleLensError as error:
        return Check(status=Status.RUNTIME_ERROR, reason=error.message, call=call, code=name)
    run = ready.run
    if candidate is not None:
        run = replay.run(bind(candidate, ready.module), call, (ready.run.args, ready.run.kwargs))
    trial = attempt(run, replay, call, backward=backward, same=same)
    warnings = _drift_warnings(replay)
    if trial.failure:
        return Check(
            status=Status.RUNTIME_ERROR,
            reason=trial.failure,
            call=call,
            code=name,
            warnings=warnings,
        )
    if ready.synthesized:
        reason = "the inputs were synthesised: there is nothing to compare with"
        return Check(status=Status.NOT_COMPARABLE, reason=reason, call=call, code=name)
    try:
        expected = replay.value(record.output)
    except NotRebuildable as error:
        return Check(status=Status.NOT_COMPARABLE, reason=error.message, call=call, code=name)
    leaves, anchor = compare(expected, trial.output, same_code=True), None
    if not same and verdict(leaves).status is not Status.EXACT:  # bit-equal needs no anchor
        anchor = _anchor(original, candidate, call)
        leaves = compare(expected, trial.output, anchor=anchor, same_code=False)
    leaves += trial.effects
    if backward:
        leaves += gradient_leaves(original, candidate, run, call, same)
    if not same:
        warnings = (*warnings, *doubts(expected, leaves, anchor=anchor))
    return verdict(leaves, code=name, call=call, warnings=warnings)


def _same_torch(replay: Replay) -> bool:
    captured = replay.metadata.environment.torch
    return captured in ("", torch.__version__)


def _drift_warnings(replay: Replay) -> tuple[str, ...]:
    captured = replay.metadata.environment.torch
    found = [
        f"source of {path} changed since the capture"
        for path in sorted(replay.drifted - replay.edited)
    ]
    if not _same_torch(replay):
        found.append(f"captured with torch {captured}, this is {torch.__version__}")
    return tuple(found)


def _anchor(original: Replay, candidate: Any, call: int) -> Any:
    """What the original gives in float64 on the same inputs; None where that is not possible."""
    if original.edited or (candidate is None and original.drifted):
        return None  # the original's code is gone
    try:
        twin, _ = float64_run(original.ready(call).run)
    except ModuleLensError:
        return None
    if twin is None:
        return None
    trial = attempt(twin, original, call, backward=False)
    return None if trial.failure else trial.output
