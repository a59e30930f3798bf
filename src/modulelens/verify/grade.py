"""How faithfully an entry is rebuilt: tries the ways, and grades the best one per aspect."""

from __future__ import annotations

import torch
from torch import Tensor

from modulelens.errors import ClassNotFound, ModuleLensError, NotRebuildable
from modulelens.measure.compare import compare, verdict
from modulelens.measure.run import Run
from modulelens.rebuild import Strategy
from modulelens.records import Check, Grade, GradeLevel, LeafCheck, Metadata, Reason, Status
from modulelens.replay import Replay, Replayed
from modulelens.tree import dtype_of, flatten
from modulelens.verify.trial import Trial, attempt

_LEVELS = (GradeLevel.EXACT, GradeLevel.CLOSE, GradeLevel.SHAPE, GradeLevel.NO)


def grade(replay: Replay) -> Grade:
    """Rebuilds in both ways, unless the first one is exact in all, and grades the better one."""
    found, more = grade_structure(replay)
    return grade_init(replay, found) if more else found


def grade_structure(replay: Replay) -> tuple[Grade, bool]:
    """The grade without constructors, and whether the constructor should be tried as well.

    Constructors may fill registries of the process that a module rebuilt without one then finds:
    to be true in a new process, this comes before any constructor of the same class ran.
    """
    found = _grade_with(replay, "structure")
    return found, any(_rank(found)) or replay.strategies()[0] == "init"


def grade_init(replay: Replay, structure: Grade) -> Grade:
    """The better of that grade and the constructor's; of equal ones, the way to try first."""
    first = replay.strategies()[0]
    ways = (_grade_with(replay, "init"), structure)
    return min(ways, key=lambda found: (*_rank(found), found.strategy != first))


def _rank(found: Grade) -> tuple[int, ...]:
    aspects = (found.level, found.buffers, found.param_grads, found.input_grads)
    return tuple(0 if a is None else _LEVELS.index(a) for a in aspects)


def _grade_with(replay: Replay, strategy: Strategy) -> Grade:
    outputs, buffers, reasons = GradeLevel.EXACT, None, dict[str, tuple[str, str]]()
    sums: dict[str, Tensor] = {}
    worst, silent = 0.0, False
    for call in reversed(range(len(replay.metadata.calls))):
        try:
            ready = replay.ready(call, strategy)
        except ModuleLensError as error:
            return _no(strategy, _reason_of(error), error.message)
        trial = attempt(ready.run, replay, call, backward=bool(replay.call(call).grad_output))
        level, reason, error_size = _grade_outputs(replay, ready, call, trial)
        worst = max(worst, error_size)
        if reason and _LEVELS.index(level) >= _LEVELS.index(outputs):
            reasons["outputs"] = reason
        outputs = max(outputs, level, key=_LEVELS.index)
        if level is GradeLevel.NO:
            break
        if trial.effects and level is not GradeLevel.SHAPE:
            changed = verdict(trial.effects)
            found = GradeLevel.EXACT if changed.status is Status.EXACT else GradeLevel.NO
            buffers = max(buffers or GradeLevel.EXACT, found, key=_LEVELS.index)
            if found is GradeLevel.NO:
                reasons["buffers"] = (Reason.MISMATCH.value, changed.reason)
        if replay.call(call).step == 0:  # the step whose parameter gradients were kept
            _add_gradients(sums, ready.run)
            silent |= _silent(ready.run, trial)
    grads, why = (
        (None, None) if outputs is GradeLevel.NO else _grade_gradients(replay, sums, silent)
    )
    if why:
        reasons["param_grads"] = why
    return Grade(
        level=outputs,
        strategy=strategy,
        outputs=outputs,
        buffers=buffers,
        param_grads=grads,
        reasons=reasons,
        max_abs=worst or None,
        calls=len(replay.metadata.calls),
    )


def _no(strategy: str, reason: str, text: str) -> Grade:
    level = GradeLevel.NO
    return Grade(level=level, strategy=strategy, outputs=level, reasons={"outputs": (reason, text)})


def _reason_of(error: ModuleLensError) -> str:
    if isinstance(error, NotRebuildable):
        return error.reason
    return (
        Reason.NOT_IMPORTABLE.value
        if isinstance(error, ClassNotFound)
        else Reason.RUNTIME_ERROR.value
    )


def _grade_outputs(
    replay: Replay, ready: Replayed, call: int, trial: Trial
) -> tuple[GradeLevel, tuple[str, str] | None, float]:
    record, output = replay.call(call), trial.output
    if trial.failure:
        code = Reason.ANCESTOR if "ancestor" in trial.failure else Reason.RUNTIME_ERROR
        return GradeLevel.NO, (code.value, trial.failure), 0.0
    if ready.synthesized:
        return (
            GradeLevel.SHAPE,
            (Reason.SHAPE_ONLY.value, "inputs or weights were synthesised"),
            0.0,
        )
    try:
        expected = replay.value(record.output)
    except NotRebuildable as error:
        return GradeLevel.SHAPE, (Reason.SHAPE_ONLY.value, error.message), 0.0
    if flatten(expected).opaque:
        return GradeLevel.NO, (Reason.OPAQUE_OUTPUT.value, flatten(expected).opaque[0]), 0.0
    found = verdict(compare(expected, output, same_code=True))
    if found.status is Status.EXACT:
        return GradeLevel.EXACT, None, 0.0
    loose = verdict(compare(expected, output, same_code=False))
    worst = found.worst.max_abs if found.worst and found.worst.max_abs else 0.0
    if loose.status.passed:
        return GradeLevel.CLOSE, (Reason.MISMATCH.value, found.reason), worst
    again = attempt(ready.run, replay, call, backward=False)
    if verdict(compare(output, again.output, same_code=True)).status is not Status.EXACT:
        text = "two replays from one random state differ: it draws from outside the streams"
        return GradeLevel.NO, (Reason.OUTSIDE_ENTROPY.value, text), worst
    return GradeLevel.NO, (Reason.MISMATCH.value, found.reason), worst


def _add_gradients(sums: dict[str, Tensor], run: Run) -> None:
    # Calls are visited last to first, which is the order in which backward adds them up.
    for name, grad in run.gradients()[0].items():
        sums[name] = sums[name] + grad if name in sums else grad.clone()


def _silent(run: Run, trial: Trial) -> bool:
    if run.grad_output is None:  # no output got a gradient
        return any(tensor.requires_grad for tensor in flatten(trial.output).tensors)
    return any(seed is None for seed in run.grad_output)


def _grade_gradients(
    replay: Replay, sums: dict[str, Tensor], silent: bool
) -> tuple[GradeLevel | None, tuple[str, str] | None]:
    """`silent` says that some output which requires grad got none in the step."""
    metadata = replay.metadata
    if not metadata.param_grads:
        return None, None
    if metadata.dropped_calls:
        return None, (
            Reason.NOT_KEPT.value,
            f"{metadata.dropped_calls} calls were not kept; the sum is not complete",
        )
    prefix = f"{metadata.fqn}." if metadata.fqn else ""
    shared = {
        n for n, others in metadata.ties.items() if any(not o.startswith(prefix) for o in others)
    }
    own = {
        name: replay.gradient(structure)
        for name, structure in metadata.param_grads.items()
        if name not in shared and not any(name in metadata.ties.get(n, ()) for n in shared)
    }
    if not own:
        return None, (Reason.SHARED_PARAMETER.value, "its parameters are used outside it as well")

    if not silent and not any(call.grad_output for call in metadata.calls):
        why = "no gradient of its outputs was seen: the forward ran without grad, as when it is "
        why += "checkpointed, or they are no plain tensors"
        return None, (Reason.NOT_KEPT.value, why)

    def compared(dtype: torch.dtype | None, *, same_code: bool) -> Check:
        leaves: list[LeafCheck] = []
        for name, grad in own.items():
            sides = [
                s if s is None or dtype is None else s.to(dtype) for s in (grad, sums.get(name))
            ]
            leaves += compare(*sides, path=f'grad["{name}"]', same_code=same_code)
        return verdict(leaves)

    found = compared(None, same_code=True)
    if found.status is Status.EXACT:
        return GradeLevel.EXACT, None
    summed = _summed_in(metadata)
    if compared(summed, same_code=False).status.passed:
        return GradeLevel.CLOSE, (Reason.MISMATCH.value, f"{found.reason}; the order of a sum")
    if silent and not own.keys() <= sums.keys():
        text = f"{found.reason}; an output got no gradient, as when its caller writes to it"
        return GradeLevel.NO, (Reason.OUTPUT_MODIFIED_BY_CALLER.value, text)
    text = f"{found.reason}; gradient reaches it other than through its outputs"
    return GradeLevel.NO, (Reason.GRADIENT_SIDE_CHANNEL.value, text)


def _summed_in(metadata: Metadata) -> torch.dtype | None:
    """Under autocast the calls share one cast of a weight, and their gradients add up in it."""
    kinds = {a.dtype for call in metadata.calls for a in call.context.ambient.autocast}
    return dtype_of(kinds.pop()) if len(metadata.calls) > 1 and len(kinds) == 1 else None
