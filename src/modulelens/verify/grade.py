"""How faithfully an entry is rebuilt: tries the ways, and grades the best one per aspect."""

from __future__ import annotations

from typing import Any

from modulelens.errors import ClassNotFound, ModuleLensError, NotRebuildable
from modulelens.measure.compare import compare, verdict
from modulelens.rebuild import Strategy
from modulelens.records import Grade, GradeLevel, Reason, Status
from modulelens.replay import Replay, Replayed
from modulelens.tree import flatten
from modulelens.verify.gradients import Gradients
from modulelens.verify.trial import Trial, attempt, replaced

#: The level of a call's outputs, why it is not exact, and the largest error.
_Found = tuple[GradeLevel, tuple[str, str] | None, float]
#: Why what ranks added up differs in the last bits.
_SUMMED = "; ranks add their parts up in another order"
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
    gradients = Gradients(replay)
    worst = 0.0
    for call in reversed(range(len(replay.metadata.calls))):
        try:
            ready = replay.ready(call, strategy)
        except ModuleLensError as error:
            why = {"outputs": (_reason_of(error), error.message)}
            no = GradeLevel.NO
            return Grade(level=no, strategy=strategy, outputs=no, reasons=why)
        trial = attempt(ready.run, replay, call, backward=bool(replay.call(call).grad_output))
        if not trial.failure:
            gradients.add(call, ready.run, trial)
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
    param_grads = input_grads = None
    if outputs in (GradeLevel.EXACT, GradeLevel.CLOSE):  # else there is nothing to compare with
        param_grads, input_grads = gradients.grade(reasons)
    return Grade(
        level=outputs,
        strategy=strategy,
        outputs=outputs,
        buffers=buffers,
        param_grads=param_grads,
        input_grads=input_grads,
        reasons=reasons,
        max_abs=worst or None,
        calls=len(replay.metadata.calls),
    )


def _reason_of(error: ModuleLensError) -> str:
    if isinstance(error, NotRebuildable):
        return error.reason
    missing = isinstance(error, ClassNotFound)
    return str((Reason.NOT_IMPORTABLE if missing else Reason.RUNTIME_ERROR).value)


def _grade_outputs(replay: Replay, ready: Replayed, call: int, trial: Trial) -> _Found:
    record, output = replay.call(call), trial.output
    if trial.failure:
        return GradeLevel.NO, _failed(replay, trial.failure), 0.0
    if ready.synthesized:
        text = f"{ready.synthesized} were synthesised"
        return GradeLevel.SHAPE, (Reason.SHAPE_ONLY.value, text), 0.0
    try:
        expected = replay.value(record.output)
    except NotRebuildable as error:
        return GradeLevel.SHAPE, (Reason.SHAPE_ONLY.value, error.message), 0.0
    if flatten(expected).opaque:
        return GradeLevel.NO, (Reason.OPAQUE_OUTPUT.value, flatten(expected).opaque[0]), 0.0
    found = verdict(compare(expected, output, same_code=True))
    if found.status is Status.EXACT:
        return _steady(replay, ready, call, output)
    loose = verdict(compare(expected, output, same_code=False))
    worst = found.worst.max_abs if found.worst and found.worst.max_abs else 0.0
    if loose.status.passed:
        text = f"{found.reason}{_SUMMED if replay.metadata.merged else ''}"
        return GradeLevel.CLOSE, (Reason.MISMATCH.value, text), worst
    level, reason, _ = _steady(replay, ready, call, output)
    if level is GradeLevel.NO:
        return level, reason, worst
    if replay.gap:
        return GradeLevel.NO, (Reason.NOT_KEPT.value, f"{found.reason}; {replay.gap}"), worst
    if replay.parts:
        return GradeLevel.NO, (Reason.SHARDED.value, _in_parts(replay, found.reason)), worst
    text = "; ".join((found.reason, *replaced(replay)))
    return GradeLevel.NO, (Reason.MISMATCH.value, text), worst


def _failed(replay: Replay, failure: str) -> tuple[str, str]:
    if replay.parts:  # code that is handed a part finds other sizes than those of the whole
        return Reason.SHARDED.value, _in_parts(replay, failure)
    return (Reason.ANCESTOR if "ancestor" in failure else Reason.RUNTIME_ERROR).value, failure


def _in_parts(replay: Replay, why: str) -> str:
    return f"{why}; it lies in parts on ranks {sorted(replay.parts)}: merge them"


def _steady(replay: Replay, ready: Replayed, call: int, output: Any) -> _Found:
    """Exact, unless a second replay differs from the first: equality once may be luck."""
    again = attempt(ready.run, replay, call, backward=False)
    if verdict(compare(output, again.output, same_code=True)).status is Status.EXACT:
        return GradeLevel.EXACT, None, 0.0
    text = "two replays differ: it depends on what is outside the module, such as a global counter"
    return GradeLevel.NO, (Reason.OUTSIDE_ENTROPY.value, text), 0.0
