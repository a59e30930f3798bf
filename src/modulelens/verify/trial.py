"""One run of a replay, and what it left behind. Judges side effects and gradients by leaf."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import torch
from torch import Tensor, nn

from modulelens.errors import ModuleLensError, text_of
from modulelens.measure.compare import compare
from modulelens.measure.run import Run
from modulelens.measure.untouched import untouched
from modulelens.records import LeafCheck, Status, Structure, all_kept, tensor_refs
from modulelens.replay import Replay
from modulelens.tree import flatten


@dataclasses.dataclass
class Trial:
    """A run that ended. `effects` compares what the forward changed; failures are foreign errors.

    `state` says by dotted name what else of the module's state is another after the forward.
    `failure` is the forward's, and `backward_failure` the backward's after a forward that ended.
    """

    output: Any = None
    failure: str = ""
    backward_failure: str = ""
    effects: list[LeafCheck] = dataclasses.field(default_factory=list)
    state: dict[str, bool] = dataclasses.field(default_factory=dict)


def attempt(
    run: Run, replay: Replay, call: int, *, backward: bool, same: bool = True, total: bool = True
) -> Trial:
    """Runs forward, and backward from the captured output gradients; foreign errors are a result.

    Without `total`, backward starts from other gradients, and the outputs' own gradient hooks see
    them: captured totals are what these hooks had made already.

    Side effects are compared in between: a backward under activation checkpointing runs the
    forward again, and moves buffers again.
    """
    with run:
        trial = forward(run)
        if trial.failure:
            return trial
        trial.effects = _side_effects(replay, run, call, same)
        if not same:
            trial.state = run.state.changed()
        if backward:
            try:
                seeds = replay.seeds(call, trial.output)
                run.grad_output = seeds if total else list(map(_other_gradient, seeds))
                run.backward(trial.output, total=total)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - boundary: the user's backward
                trial.backward_failure = _story(error)
    return trial


def forward(run: Run) -> Trial:
    """Starts the run over and runs its forward; a foreign error is a result."""
    with run:
        try:
            run.fresh()
            return Trial(run.forward())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - boundary: the user's forward, its exits
            return Trial(failure=_story(error))


def _story(error: BaseException) -> str:
    if isinstance(error, ModuleLensError):
        return error.message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text_of(error)} ({frame.filename}:{frame.lineno})"


@untouched
def _side_effects(replay: Replay, run: Run, call: int, same: bool) -> list[LeafCheck]:
    """What the call changed, and what it should have left as it was."""
    record, leaves = replay.call(call), []
    if run.owner is not None:
        after = {"buffers": record.buffers_after, "attributes": record.attributes_after}
        for kind, named in after.items():
            for path, structure in named.items():
                actual, where = _lookup(run.owner, path), f'{kind}["{path}"]'
                # Other code need not keep what the original keeps.
                if all_kept(structure) and (same or kind == "buffers" or actual is not None):
                    leaves += compare(replay.value(structure), actual, path=where, same_code=same)
        leaves += _written(run.owner, run, set(record.buffers_after))
    args, kwargs = run.inputs
    if record.args_after is None:
        leaves += _changed_inputs((run.args, args), "args")
        leaves += _changed_inputs((run.kwargs, kwargs), "kwargs")
    elif all_kept([record.args_after, record.kwargs_after]):
        leaves += compare(replay.value(record.args_after), args, path="args", same_code=same)
        leaves += compare(replay.value(record.kwargs_after), kwargs, path="kwargs", same_code=same)
    return leaves


def _written(owner: nn.Module, run: Run, allowed: set[str]) -> list[LeafCheck]:
    written = {id(tensor) for tensor in run.state.written()}
    named = [*owner.named_parameters(), *owner.named_buffers()] if written else []
    changed = (name for name, tensor in named if id(tensor) in written and name not in allowed)
    return [_changed(f'state["{name}"]') for name in changed]


def altered(original: Replay, call: int, trial: Trial) -> list[LeafCheck]:
    """What of the module's state a candidate's run changed and the original leaves alone.

    The original runs where that is in question; what it does not have is the candidate's own.
    """
    record = original.call(call)
    known = {*record.buffers_after, *record.attributes_after}
    known |= {leaf.path.split('"')[1] for leaf in trial.effects if leaf.path.startswith("state[")}
    names = {name for name, other in trial.state.items() if other and name not in known}
    if not names or original.drifted:
        return []
    own = attempt(original.ready(call).run, original, call, backward=False, same=False).state
    return [
        _changed(f'state["{name}"]') for name in names if not own.get(name, not name.endswith("()"))
    ]


def _changed_inputs(sides: tuple[Any, Any], root: str) -> list[LeafCheck]:
    # By path: lazily filled caches of an argument may be new, but nothing that was may change.
    before, after = (flatten(side).named for side in sides)
    pairs = {path: compare(tensor, after.get(path))[0] for path, tensor in before.items()}
    return [
        _changed(root + path) for path, leaf in pairs.items() if leaf.status is not Status.EXACT
    ]


def _changed(path: str) -> LeafCheck:
    message = "changed by the call; the original leaves it as it is"
    return LeafCheck(path=path, status=Status.MISMATCH_VALUE, message=message)


def _lookup(module: nn.Module, path: str) -> Any:
    *parents, name = path.split(".")
    owner: Any = module
    for part in parents:
        owner = owner._modules.get(part)
        if owner is None:
            return None
    return owner._buffers.get(name, owner._parameters.get(name, vars(owner).get(name)))


@untouched
def lost_history(structure: Structure, output: Any) -> list[LeafCheck]:
    """Leaves of an output that should require grad, as the captured ones do, and do not."""
    refs = list({ref.object: ref for ref in tensor_refs(structure)}.values())
    flat = flatten(output)
    if len(refs) != len(flat.tensors):
        return []
    message = "does not require grad; the original's does"
    return [
        LeafCheck(path=f"output{path}", status=Status.MISMATCH_STRUCTURE, message=message)
        for ref, tensor, path in zip(refs, flat.tensors, flat.paths, strict=True)
        if ref.spec.requires_grad and not tensor.requires_grad
    ]


def replaced(replay: Replay) -> list[str]:
    """Says that what ran at the capture was not what the class's text shows."""
    source = replay.metadata.source
    if source is None or source.reliable:
        return []
    return [f"{source.path} ran other code than its source shows: it was patched or defined anew"]


def gradient_leaves(
    original: Replay, run: Run, call: int, trial: Trial, same: bool, *, total: bool = True
) -> list[LeafCheck]:
    """Gradients of parameters and inputs, against the original's on the same seeds.

    Where an output has a gradient hook of its own, once more with what the hooks make of others.
    """
    if original.drifted:
        text = "the original's code is gone, and no gradients were captured to compare with"
        return [LeafCheck(path="grad", status=Status.NOT_COMPARABLE, message=text)]
    reference = original.ready(call)
    other = attempt(reference.run, original, call, backward=True, total=total)
    text = other.failure or other.backward_failure or trial.failure or trial.backward_failure
    if text:
        return [LeafCheck(path="grad", status=Status.NOT_COMPARABLE, message=text)]
    pairs = list(zip(reference.run.gradients(), run.gradients(), strict=True))
    if run.owner is None:
        del pairs[0]  # a plain function has no parameters of its own
    leaves: list[LeafCheck] = []
    root = "grad" if total else "grad through hooks"
    with untouched:
        for expected, actual in pairs:
            for name, grad in expected.items():
                leaves += compare(grad, actual.get(name), path=f'{root}["{name}"]', same_code=same)
    if not total or not any(map(_hooked, (trial.output, other.output))):
        return leaves
    trial = attempt(run, original, call, backward=True, same=same, total=False)
    return leaves + gradient_leaves(original, run, call, trial, same, total=False)


def _other_gradient(gradient: Tensor | None) -> Tensor | None:
    """One that is larger than what was captured: a hook that clips would leave that as it is."""
    if gradient is None:
        return None
    drawn = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(gradient) * (10 + 10 * gradient.abs().mean())


def _hooked(output: Any) -> bool:
    return any(tensor._backward_hooks for tensor in flatten(output).tensors)
