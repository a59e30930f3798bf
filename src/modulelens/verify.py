"""Verdicts on an entry: does a rebuilt or edited module do what was captured?

Knows replays and comparisons. `check` judges one candidate; `grade` tries the ways of rebuilding
and says how faithful the best one is, per aspect.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modulelens.errors import ClassNotFound, ModuleLensError, NotRebuildable
from modulelens.measure.anchor import float64_run
from modulelens.measure.compare import compare, doubts, verdict
from modulelens.measure.run import Run
from modulelens.rebuild import Strategy
from modulelens.records import Check, Grade, GradeLevel, LeafCheck, Metadata, Reason, Status
from modulelens.replay import Replay, Replayed
from modulelens.tree import dtype_of, flatten

_LEVELS = (GradeLevel.EXACT, GradeLevel.CLOSE, GradeLevel.SHAPE, GradeLevel.NO)


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
    output, failure = _run(run, backward, replay, call)
    warnings = _drift_warnings(replay)
    if failure:
        return Check(
            status=Status.RUNTIME_ERROR, reason=failure, call=call, code=name, warnings=warnings
        )
    if ready.synthesized:
        reason = "the inputs were synthesised: there is nothing to compare with"
        return Check(status=Status.NOT_COMPARABLE, reason=reason, call=call, code=name)
    try:
        expected = replay.value(record.output)
    except NotRebuildable as error:
        return Check(status=Status.NOT_COMPARABLE, reason=error.message, call=call, code=name)
    leaves, anchor = compare(expected, output, same_code=True), None
    if not same and verdict(leaves).status is not Status.EXACT:  # bit-equal needs no anchor
        anchor = _anchor(original, candidate, call)
        leaves = compare(expected, output, anchor=anchor, same_code=False)
    leaves += _side_effects(replay, run, call, same)
    if backward:
        leaves += _gradient_leaves(original, candidate, run, call, same)
    if not same:
        warnings = (*warnings, *doubts(expected, leaves, anchor=anchor))
    return verdict(leaves, code=name, call=call, warnings=warnings)


def bind(candidate: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A function whose first parameter is `module` gets the rebuilt module, for its weights."""
    if isinstance(candidate, nn.Module):
        return candidate
    try:
        first = next(iter(inspect.signature(candidate).parameters), "")
    except (TypeError, ValueError):
        first = ""
    if first != "module":
        return candidate
    return _WithModule(candidate, module).call


class _WithModule(nn.Module):
    """Lets a run see the module whose state it has to put back."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.module, *args, **kwargs)


def _run(run: Run, backward: bool, replay: Replay, call: int) -> tuple[Any, str]:
    try:
        with run:
            run.fresh()
            output = run.forward()
            if backward:
                run.grad_output = replay.seeds(call, output)
                run.backward(output)
    except ModuleLensError as error:
        return None, error.message
    except Exception as error:  # noqa: BLE001 - boundary: the user's forward
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    return output, ""


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
    output, failure = _run(twin, False, original, call)
    return None if failure else output


def _side_effects(replay: Replay, run: Run, call: int, same: bool) -> list[LeafCheck]:
    """Buffers after the call, and arguments that the call changed."""
    record, leaves = replay.call(call), []
    owner = run.owner.module if isinstance(run.owner, _WithModule) else run.owner
    if owner is not None:
        for path, structure in record.buffers_after.items():
            actual = _lookup(owner, path)
            expected = replay.value(structure)
            leaves += compare(expected, actual, path=f'buffers["{path}"]', same_code=same)
    if record.args_after is not None:
        args, kwargs = run.inputs
        leaves += compare(replay.value(record.args_after), args, path="args", same_code=same)
        leaves += compare(replay.value(record.kwargs_after), kwargs, path="kwargs", same_code=same)
    return leaves


def _lookup(module: nn.Module, path: str) -> Any:
    *parents, name = path.split(".")
    owner: Any = module
    for part in parents:
        owner = owner._modules.get(part)
        if owner is None:
            return None
    return owner._buffers.get(name, vars(owner).get(name))


def _gradient_leaves(
    replay: Replay, candidate: Any, run: Run, call: int, same: bool
) -> list[LeafCheck]:
    """Gradients of parameters and inputs, against the original's on the same seeds."""
    parameters, inputs = run.gradients()
    reference = replay.ready(call)
    _, failure = _run(reference.run, True, replay, call)
    if failure:
        return [LeafCheck(path="grad", status=Status.NOT_COMPARABLE, message=failure)]
    expected, expected_inputs = reference.run.gradients()
    if isinstance(run.owner, _WithModule):
        parameters = {name.removeprefix("module."): grad for name, grad in parameters.items()}
    leaves = []
    for kind, wanted, found in (("grad", expected, parameters), ("grad", expected_inputs, inputs)):
        if kind == "grad" and wanted is expected and candidate is not None and not parameters:
            continue  # a plain function has no parameters of its own
        for name, grad in wanted.items():
            leaves += compare(grad, found.get(name), path=f'{kind}["{name}"]', same_code=same)
    return leaves


# ---- grading


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
    worst = 0.0
    for call in reversed(range(len(replay.metadata.calls))):
        try:
            ready = replay.ready(call, strategy)
        except ModuleLensError as error:
            return _no(strategy, _reason_of(error), error.message)
        level, reason, error_size = _grade_outputs(replay, ready, call)
        worst = max(worst, error_size)
        if reason and _LEVELS.index(level) >= _LEVELS.index(outputs):
            reasons["outputs"] = reason
        outputs = max(outputs, level, key=_LEVELS.index)
        if level is GradeLevel.NO:
            break
        changed = (
            _side_effects(replay, ready.run, call, same=True)
            if level is not GradeLevel.SHAPE
            else []
        )
        if changed:
            status = verdict(changed).status
            found = GradeLevel.EXACT if status is Status.EXACT else GradeLevel.NO
            buffers = max(buffers or GradeLevel.EXACT, found, key=_LEVELS.index)
            if found is GradeLevel.NO:
                reasons["buffers"] = (Reason.MISMATCH.value, verdict(changed).reason)
        _add_gradients(sums, ready.run)
    grads, why = (None, None) if outputs is GradeLevel.NO else _grade_gradients(replay, sums)
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
    replay: Replay, ready: Replayed, call: int
) -> tuple[GradeLevel, tuple[str, str] | None, float]:
    record = replay.call(call)
    output, failure = _run(ready.run, bool(record.grad_output), replay, call)
    if failure:
        code = Reason.ANCESTOR if "ancestor" in failure else Reason.RUNTIME_ERROR
        return GradeLevel.NO, (code.value, failure), 0.0
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
    again, _ = _run(ready.run, False, replay, call)
    if verdict(compare(output, again, same_code=True)).status is not Status.EXACT:
        text = "two replays from one random state differ: it draws from outside the streams"
        return GradeLevel.NO, (Reason.OUTSIDE_ENTROPY.value, text), worst
    return GradeLevel.NO, (Reason.MISMATCH.value, found.reason), worst


def _add_gradients(sums: dict[str, Tensor], run: Run) -> None:
    # Calls are visited last to first, which is the order in which backward adds them up.
    for name, grad in run.gradients()[0].items():
        sums[name] = sums[name] + grad if name in sums else grad.clone()


def _grade_gradients(
    replay: Replay, sums: dict[str, Tensor]
) -> tuple[GradeLevel | None, tuple[str, str] | None]:
    metadata = replay.metadata
    if not metadata.param_grads or not any(call.grad_output for call in metadata.calls):
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
    text = f"{found.reason}; gradient reaches it other than through its outputs"
    return GradeLevel.NO, (Reason.GRADIENT_SIDE_CHANNEL.value, text)


def _summed_in(metadata: Metadata) -> torch.dtype | None:
    """Under autocast the calls share one cast of a weight, and their gradients add up in it."""
    kinds = {a.dtype for call in metadata.calls for a in call.context.ambient.autocast}
    return dtype_of(kinds.pop()) if len(metadata.calls) > 1 and len(kinds) == 1 else None
