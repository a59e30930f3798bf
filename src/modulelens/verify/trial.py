"""One run of a replay, and what it left behind. Judges side effects and gradients by leaf."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from torch import nn

from modulelens.errors import ModuleLensError
from modulelens.measure.compare import compare
from modulelens.measure.run import Run
from modulelens.records import LeafCheck, Status
from modulelens.replay import Replay


@dataclasses.dataclass
class Trial:
    """A run that ended. `effects` compares what the forward changed; `failure` is its error."""

    output: Any = None
    failure: str = ""
    effects: list[LeafCheck] = dataclasses.field(default_factory=list)


def attempt(run: Run, replay: Replay, call: int, *, backward: bool, same: bool = True) -> Trial:
    """Runs forward, and backward from the captured output gradients; foreign errors are a result.

    Side effects are compared in between: a backward under activation checkpointing runs the
    forward again, and moves buffers again.
    """
    trial = Trial()
    try:
        with run:
            run.fresh()
            trial.output = run.forward()
            trial.effects = _side_effects(replay, run, call, same)
            if backward:
                run.grad_output = replay.seeds(call, trial.output)
                run.backward(trial.output)
    except ModuleLensError as error:
        return Trial(failure=error.message)
    except Exception as error:  # noqa: BLE001 - boundary: the user's forward
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"({frame.filename}:{frame.lineno})"
        return Trial(failure=f"{type(error).__name__}: {error} {where}")
    return trial


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
    return WithModule(candidate, module).call


class WithModule(nn.Module):
    """Lets a run see the module whose state it has to put back."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The function on the module and the arguments."""
        return self._function(self.module, *args, **kwargs)


def _side_effects(replay: Replay, run: Run, call: int, same: bool) -> list[LeafCheck]:
    """Buffers after the call, and arguments that the call changed."""
    record, leaves = replay.call(call), []
    owner = run.owner.module if isinstance(run.owner, WithModule) else run.owner
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


def gradient_leaves(
    replay: Replay, candidate: Any, run: Run, call: int, same: bool
) -> list[LeafCheck]:
    """Gradients of parameters and inputs, against the original's on the same seeds."""
    parameters, inputs = run.gradients()
    reference = replay.ready(call)
    trial = attempt(reference.run, replay, call, backward=True)
    if trial.failure:
        return [LeafCheck(path="grad", status=Status.NOT_COMPARABLE, message=trial.failure)]
    expected, expected_inputs = reference.run.gradients()
    if isinstance(run.owner, WithModule):
        parameters = {name.removeprefix("module."): grad for name, grad in parameters.items()}
    leaves = []
    for kind, wanted, found in (("grad", expected, parameters), ("grad", expected_inputs, inputs)):
        if kind == "grad" and wanted is expected and candidate is not None and not parameters:
            continue  # a plain function has no parameters of its own
        for name, grad in wanted.items():
            leaves += compare(grad, found.get(name), path=f'{kind}["{name}"]', same_code=same)
    return leaves
