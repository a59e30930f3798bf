"""Gradients of replayed calls against those that the step saw: of parameters and of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from modulelens.measure.compare import compare, verdict
from modulelens.measure.run import Run
from modulelens.measure.untouched import untouched
from modulelens.records import GradeLevel, LeafCheck, Metadata, Reason, Status, all_kept
from modulelens.replay import Replay
from modulelens.tree import dtype_of, flatten
from modulelens.verify.trial import Trial

Reasons = dict[str, tuple[str, str]]
_FROM_ELSEWHERE = (Reason.GRADIENT_SIDE_CHANNEL.value, Reason.OUTPUT_MODIFIED_BY_CALLER.value)


class Gradients:
    """Collects the gradients of one entry's replayed calls, then grades them."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._metadata = replay.metadata
        self._sums: dict[str, Tensor] = {}
        self._silent = False
        self._inputs: list[bool] = []

    @untouched
    def add(self, call: int, run: Run, trial: Trial) -> None:
        """Adds a call. Calls come last to first, the order in which backward adds them up."""
        record = self._replay.call(call)
        if record.step:  # parameter gradients are those of the first traced step
            return
        parameters, inputs = run.gradients()
        for name, grad in () if record.nested else parameters.items():
            self._sums[name] = self._sums[name] + grad if name in self._sums else grad.clone()
        self._silent |= _silent(run, trial)
        paths = _input_paths(run)
        for place, structure in record.grad_input.items():
            if not all_kept(structure):
                continue
            seen = self._replay.gradient(structure)
            found = compare(seen, inputs.get(paths[int(place)]))
            self._inputs.append(verdict(found).status is Status.EXACT)

    def grade(self, reasons: Reasons) -> tuple[GradeLevel | None, GradeLevel | None]:
        """Levels of parameter and input gradients; None where there is nothing to grade.

        What the step saw at an input is the sum over all its consumers: it is this module's own
        where it is equal, and says nothing where it is not.
        """
        level, why = self._parameters()
        if why is not None:
            reasons["param_grads"] = why
        if not self._inputs:
            return level, None
        if all(self._inputs):
            return level, GradeLevel.EXACT
        text = "other modules use an input as well, and the step saw the sum over all of them"
        reasons["input_grads"] = (Reason.SHARED_INPUT.value, text)
        return level, None

    @untouched
    def leaves(self, *, same_code: bool) -> tuple[list[LeafCheck], tuple[str, str] | None]:
        """One leaf per parameter gradient; without any, the reason why there is none.

        What verification found of them, a sum in another order or gradients that the module's
        outputs do not bring, is no fault of the code.
        """
        own, why = self._comparable()
        if not own:
            return [], why
        found = self._compared(own, None, same_code=same_code)
        if verdict(found).status.passed:
            return found, None
        loose = self._compared(own, _summed_in(self._metadata), same_code=False)
        grade = self._metadata.grade
        known = grade.reasons.get("param_grads") if grade else None
        if verdict(loose).status.passed or known is None or known[0] not in _FROM_ELSEWHERE:
            return (loose if verdict(loose).status.passed else found), None
        return [], known

    def _parameters(self) -> tuple[GradeLevel | None, tuple[str, str] | None]:
        own, why = self._comparable()
        if not own:
            return None, why
        found = verdict(self._compared(own, None, same_code=True))
        if found.status is Status.EXACT:
            return GradeLevel.EXACT, None
        loose = self._compared(own, _summed_in(self._metadata), same_code=False)
        if verdict(loose).status.passed:
            return GradeLevel.CLOSE, (Reason.MISMATCH.value, f"{found.reason}; the order of a sum")
        if self._silent and not own.keys() <= self._sums.keys():
            text = f"{found.reason}; an output got no gradient, as when its caller writes to it"
            return GradeLevel.NO, (Reason.OUTPUT_MODIFIED_BY_CALLER.value, text)
        text = f"{found.reason}; gradient reaches it other than through its outputs"
        return GradeLevel.NO, (Reason.GRADIENT_SIDE_CHANNEL.value, text)

    def _comparable(self) -> tuple[dict[str, Tensor], tuple[str, str] | None]:
        metadata = self._metadata
        if not metadata.param_grads:
            return {}, None
        if not all(map(all_kept, metadata.param_grads.values())):
            return {}, (Reason.NOT_KEPT.value, "only the shapes of gradients were kept")
        if metadata.dropped_calls:
            text = f"{metadata.dropped_calls} calls were not kept; the sum is not complete"
            return {}, (Reason.NOT_KEPT.value, text)
        own = self._own()
        if not own:
            text = "its parameters are used outside it as well"
            return {}, (Reason.SHARED_PARAMETER.value, text)
        if not self._silent and not any(call.grad_output for call in metadata.calls):
            text = "no gradient of its outputs was seen: the forward ran without grad, as when it "
            text += "is checkpointed, or they are no plain tensors"
            return {}, (Reason.NOT_KEPT.value, text)
        return own, None

    def _own(self) -> dict[str, Tensor]:
        """Captured gradients of the parameters that nothing outside the module uses."""
        metadata = self._metadata
        prefix = f"{metadata.fqn}." if metadata.fqn else ""
        ties = metadata.ties
        shared = {n for n, others in ties.items() if any(not o.startswith(prefix) for o in others)}
        return {
            name: self._replay.gradient(structure)
            for name, structure in metadata.param_grads.items()
            if name not in shared and not any(name in ties.get(n, ()) for n in shared)
        }

    def _compared(
        self, own: dict[str, Tensor], dtype: torch.dtype | None, *, same_code: bool
    ) -> list[LeafCheck]:
        leaves: list[LeafCheck] = []
        for name, grad in own.items():
            pair = grad, self._sums.get(name)
            sides = [s if s is None or dtype is None else s.to(dtype) for s in pair]
            leaves += compare(*sides, path=f'grad["{name}"]', same_code=same_code)
        return leaves


def _silent(run: Run, trial: Trial) -> bool:
    """Whether some output that requires grad got none in the step."""
    if run.grad_output is None:
        return any(tensor.requires_grad for tensor in flatten(trial.output).tensors)
    return any(seed is None for seed in run.grad_output)


def _input_paths(run: Run) -> list[str]:
    """Leaf number -> its path as `Run.gradients` spells it."""
    roots = {"[0]": "args", "[1]": "kwargs"}
    return [roots[path[:3]] + path[3:] for path in flatten((run.args, run.kwargs)).paths]


def _summed_in(metadata: Metadata) -> torch.dtype | None:
    """Under autocast the calls share one cast of a weight, and their gradients add up in it."""
    kinds = {a.dtype for call in metadata.calls for a in call.context.ambient.autocast}
    return dtype_of(kinds.pop()) if len(metadata.calls) > 1 and len(kinds) == 1 else None
