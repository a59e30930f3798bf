"""Benchmarks of an entry: the rebuilt module, alone or beside a candidate."""

from __future__ import annotations

import random

import msgspec

from modulelens.errors import CheckFailed
from modulelens.measure.benchmark import benchmark, compare_speed, trial_of
from modulelens.measure.run import Run
from modulelens.records import Check, Comparison, Measurement, Status, all_kept
from modulelens.replay import Replay
from modulelens.tree import flatten
from modulelens.verify import FIXED, Subject, check, varied

_TIMED = (*(s for s in Status if s.passed), Status.NOT_COMPARABLE, Status.MISMATCH_VALUE)


def refuse_broken(check: Check) -> None:
    """Lets wrong values pass, whose speed can be known all the same.

    Raises:
        CheckFailed: The candidate raised, did not end, or its outputs have another form.
    """
    if check.status in _TIMED:
        return
    worst = next((leaf for leaf in check.leaves if leaf.status is check.status), None)
    reason = check.reason or (f"{worst.path}: {worst.message}" if worst else "")
    raise CheckFailed(
        f"{check.status.value}: {check.code}: {reason}", hint="it was not timed; see `check`"
    )


def measure(
    subject: Subject, *, call: int, seed: int, backward: bool, budget_s: float
) -> Measurement | Comparison:
    """Times one call of the entry, beside the candidate where the subject is one."""
    original = subject.original
    ready = original.ready(call, seed=seed)
    both = backward and _has_backward(ready.run, original, call)
    made_up = bool(ready.synthesized) or (both and not all_kept(original.call(call).grad_output))
    if subject.own:
        trial = trial_of(ready.run, backward=both)
        measured = benchmark(trial, label=original.metadata.name, budget_s=budget_s)
        return msgspec.structs.replace(measured, synthesized=made_up)
    verdict = check(subject, call=call, backward=both)
    refuse_broken(verdict)
    other = subject.run(subject.replay.ready(call, seed=seed), call)
    if both:
        _has_backward(other, original, call)
    values = None if any(FIXED in text for text in verdict.warnings) else random.Random(0)
    sides = [trial_of(run, backward=both, values=values) for run in (ready.run, other)]
    compared = compare_speed(*sides, budget_s=budget_s)
    status = verdict.status
    if status.passed and not ready.synthesized:
        # Once more: what it does by now need not be what it did before.
        later = varied(subject, call)[0]
        status = max([status, *(leaf.status for leaf in later)], key=list(Status).index)
    return msgspec.structs.replace(
        compared,
        original=msgspec.structs.replace(compared.original, synthesized=made_up),
        candidate=msgspec.structs.replace(compared.candidate, synthesized=made_up),
        correct=status.value,
    )


def _has_backward(run: Run, replay: Replay, call: int) -> bool:
    """Whether the output requires grad; gives the run the captured output gradients."""
    with run:
        run.fresh()
        output = run.forward()
        leaves = [tensor for tensor in flatten(output).tensors if tensor.requires_grad]
        if replay.call(call).grad_output:
            run.grad_output = replay.seeds(call, output)
    return bool(leaves)
