"""Does a candidate, or the rebuilt module, compute what was captured? One verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modulelens.capture.source import source_of
from modulelens.environment import cpu_name
from modulelens.errors import ModuleLensError, NotRebuildable, RepoError, UsageError
from modulelens.measure.compare import compare, doubts, verdict
from modulelens.measure.run import Run
from modulelens.measure.untouched import untouched
from modulelens.records import Check, LeafCheck, Status, tensor_refs
from modulelens.replay import Replay
from modulelens.verify.gradients import Gradients
from modulelens.verify.subject import Subject
from modulelens.verify.trial import Trial, altered, attempt, gradient_leaves, lost_history, replaced
from modulelens.verify.varied import anchored, varied

_OTHER_KIND = (Status.MISMATCH_STRUCTURE, Status.MISMATCH_SHAPE, Status.MISMATCH_DTYPE)


def check(subject: Subject, *, call: int | None = None, backward: bool = False) -> Check:
    """Compares a run with what was captured.

    Args:
        subject: The entry and what is judged.
        call: One call; None: all that were kept.
        backward: Compare gradients as well.

    Raises:
        NotFound: There is no call of that number.
        UsageError: `call` is no number.
    """
    if call is not None:
        if type(call) is not int:
            raise UsageError(f"call={call!r} is no number", hint="calls are counted from 0")
        subject.original.call(call)
    judge = _Judge(subject, backward)
    calls = range(max(len(subject.replay.metadata.calls), 1)) if call is None else [call]
    # Last to first: the order in which backward adds the calls' gradients up.
    checks = [judge.call(number) for number in reversed(calls)]
    with untouched:
        worst = max(reversed(checks), key=lambda c: _ORDER.index(c.status))
    more: tuple[list[LeafCheck], list[str]] = ([], [])
    if backward and judge.by_capture(whole=call is None) and all(c.leaves for c in checks):
        more = judge.captured_gradients()
    elif worst.status.passed and not (subject.own or subject.original.drifted):
        more = varied(subject, worst.call)  # on values that were not captured
    with untouched:
        return _joined(worst, *more, backward=backward)


def _joined(worst: Check, more: list[LeafCheck], weak: list[str], *, backward: bool) -> Check:
    """The verdict on a call, with what was found on the whole."""
    compared = any(leaf.path.startswith("grad") for leaf in (*worst.leaves, *more))
    if backward and worst.status.passed and not compared:
        weak.append("no gradient was compared: Keep(grads=True) keeps those of the step")
    if not (more or weak):
        return worst
    warnings, leaves = (*worst.warnings, *weak), (*worst.leaves, *more)
    return verdict(leaves, code=worst.code, call=worst.call, warnings=warnings)


_ORDER = list(Status)


class _Judge:
    """Checks one subject, call by call."""

    def __init__(self, subject: Subject, backward: bool) -> None:
        self._subject = subject
        self._replay = replay = subject.replay
        self._backward = backward
        self._gradients = Gradients(replay)
        self._elsewhere = _elsewhere(replay)
        self._same = subject.function is None and not (replay.drifted or self._elsewhere)

    def by_capture(self, *, whole: bool) -> bool:
        """Whether gradients are compared with those of the step: the module's own, all calls."""
        return self._subject.own and whole and bool(self._replay.metadata.param_grads)

    def call(self, number: int) -> Check:
        """The verdict on one call."""
        replay = self._replay
        try:
            ready = replay.ready(number)
        except RepoError:
            raise  # damage of the repo is no verdict on the code
        except ModuleLensError as error:
            return self._verdict(number, Status.RUNTIME_ERROR, str(error).partition("\n")[0])
        run = self._subject.run(ready, number)
        trial = attempt(run, replay, number, backward=self._backward, same=self._same)
        if trial.failure:
            return self._verdict(number, Status.RUNTIME_ERROR, trial.failure)
        if ready.synthesized:
            reason = f"{ready.synthesized} were synthesised: there is nothing to compare with"
            return self._verdict(number, Status.NOT_COMPARABLE, reason)
        try:
            expected = replay.value(replay.call(number).output)
        except NotRebuildable as error:
            return self._verdict(number, Status.NOT_COMPARABLE, error.message)
        return self._compared(number, expected, run, trial, ready.warnings)

    def _compared(
        self, number: int, expected: Any, run: Run, trial: Trial, warnings: tuple[str, ...]
    ) -> Check:
        leaves, anchor = compare(expected, trial.output, same_code=True), None
        if not self._same and verdict(leaves).status is not Status.EXACT:  # else no anchor needed
            anchor = self._anchor(number)
            leaves = compare(expected, trial.output, anchor=anchor, same_code=False)
        fits = verdict(leaves).status not in _OTHER_KIND
        leaves += trial.effects
        if not self._subject.own:
            leaves += altered(self._subject.original, number, trial)
        if self._backward and fits:
            leaves += self._backwards(number, run, trial)
        warnings = (*self._elsewhere, *drift_warnings(self._replay), *warnings)
        if not self._same:
            inputs = run.args, run.kwargs
            warnings = (*warnings, *doubts(expected, leaves, anchor=anchor, inputs=inputs))
        if self._replay.gap and not verdict(leaves).status.passed:
            warnings = (*warnings, self._replay.gap)
        return verdict(leaves, code=self._subject.name, call=number, warnings=warnings)

    def _backwards(self, number: int, run: Run, trial: Trial) -> list[LeafCheck]:
        leaves = lost_history(self._replay.call(number).output, trial.output)
        if trial.backward_failure:
            text = trial.backward_failure
            return [*leaves, LeafCheck(path="grad", status=Status.RUNTIME_ERROR, message=text)]
        self._gradients.add(number, run, trial)
        if self.by_capture(whole=True):
            return leaves
        return leaves + gradient_leaves(self._subject.original, run, number, trial, self._same)

    def _anchor(self, number: int) -> Any:
        """What the original gives in float64 on the same inputs; None where that is not possible.

        Without a candidate, the code that drifted is what is judged: the original's is gone.
        """
        original = self._subject.original
        if original.edited or (self._subject.function is None and original.drifted):
            return None
        try:
            return anchored(original.ready(number).run)
        except ModuleLensError:
            return None

    def captured_gradients(self) -> tuple[list[LeafCheck], list[str]]:
        """The module's parameter gradients, summed over its calls, against those of the step."""
        leaves, why = self._gradients.leaves(same_code=self._same)
        return leaves, [f"parameter gradients were not compared: {why[1]}"] if why else []

    def _verdict(self, number: int, status: Status, reason: str) -> Check:
        warnings = (*self._elsewhere, *drift_warnings(self._replay))
        name = self._subject.name
        return Check(status=status, reason=reason, call=number, code=name, warnings=warnings)


def _elsewhere(replay: Replay) -> list[str]:
    """In what this run differs from the capture, so that the same code may round otherwise."""
    captured = replay.metadata.environment
    parts = [[call.args, call.kwargs, call.output] for call in replay.metadata.calls]
    devices = {ref.spec.device.partition(":")[0] for ref in tensor_refs(parts)} - {"cpu", "meta"}
    here = torch.device(replay.device).type
    places = [
        ("with torch", captured.torch, torch.__version__),
        ("on", min(devices, default="cpu"), here),
        ("on", captured.cpu if here == "cpu" and not devices else "", cpu_name()),
    ]
    differ = [place for place in places if place[1] not in ("", place[2])]
    return [f"captured {how} {then}, this is {now}" for how, then, now in differ]


def drift_warnings(replay: Replay) -> tuple[str, ...]:
    """In what the code that is found today is not the code that ran at the capture."""
    drifted = replay.drifted
    found = [_changed(replay, path) for path in sorted(replay.rewritten - replay.edited)]
    names = sorted({name for names in replay.changed_beside.values() for name in names})
    if names:
        found.append(f"code beside the captured classes changed: {', '.join(names)}")
    found += replaced(replay)
    if replay.gone_round:
        found.append(replay.gone_round)
    if replay.metadata.cls in drifted and replay.metadata.init is None:
        text = "its constructor call is not known (ml.track_init)"
        found.append(f"{text}: an edit of it is not seen here")
    return tuple(found)


def _changed(replay: Replay, path: str) -> str:
    """What is said of a class with other source, and of another one that stands in its way."""
    root = replay.metadata.roots.get(path.partition(".")[0].partition(":")[0], "")
    file = source_of(replay.importer.get(path)).file
    text = f"source of {path} changed since the capture"
    if not root or Path(file).is_relative_to(root):
        return text
    return f"{text}: it came from {root}, this is {file}; PYTHONPATH decides which one is found"
