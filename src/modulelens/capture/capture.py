"""One module of one trace, and the fate of every requested module. Knows no hooks."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from modulelens.capture.nodes import clean_fqn
from modulelens.capture.watch import SeenCall
from modulelens.records import Coverage, CoverageList, Fate
from modulelens.tree import display_path

if TYPE_CHECKING:
    from modulelens.capture.trace import Trace


@dataclasses.dataclass(eq=False)
class Capture:
    """One module as it was in one trace. `repo.add(trace)` makes an `Entry` of it.

    Attributes:
        fqn: torch's dotted path; empty for the root.
        cls: `module:qualname` of its class.
        calls: Its calls in order; inputs and outputs as structures over snapshots.
        dropped_calls: Calls beyond `Keep.max_calls`.
        recomputes: Runs under activation checkpointing, which are no calls.
        table_rows: Embedding tables of which only touched rows are kept: how many of how many.
    """

    number: int
    fqn: str
    cls: str
    module: nn.Module
    calls: list[SeenCall]
    dropped_calls: int = 0
    recomputes: int = 0
    param_grads: dict[str, Any] = dataclasses.field(default_factory=dict)
    table_rows: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        cls = self.cls.partition(":")[2]
        return f"Capture({self.fqn or '(root)'}: {cls}, {len(self.calls)} call(s))"


def captures_of(trace: Trace) -> list[Capture]:
    """The captures of all steps that were traced."""
    by_number: dict[int, list[SeenCall]] = {}
    for watch in trace.watches:
        for call in watch.calls:
            by_number.setdefault(call.number, []).append(call)
    nodes = trace.nodes
    return [
        Capture(
            number=number,
            fqn=nodes.fqns[number],
            cls=display_path(type(nodes.modules[number])),
            module=nodes.modules[number],
            calls=by_number[number],
            dropped_calls=sum(max(w.counts[number] - w.keep.max_calls, 0) for w in trace.watches),
            recomputes=sum(w.recomputes.get(number, 0) for w in trace.watches),
            param_grads=_param_grads(trace, nodes.modules[number]),
            table_rows=_table_rows(trace, number, by_number[number][0].entered),
        )
        for number in trace.targets
        if number in by_number
    ]


def _param_grads(trace: Trace, module: nn.Module) -> dict[str, Any]:
    if not trace.keep.grads or not trace.watches:
        return {}
    grads = trace.watches[0].param_grads
    named = module.named_parameters(remove_duplicate=False)
    return {clean_fqn(name): grads[id(p)] for name, p in named if id(p) in grads}


def _table_rows(trace: Trace, number: int, moment: int) -> dict[str, tuple[int, int]]:
    partly = [snapshot.rows for snapshot in trace.snapshots.taken if snapshot.rows is not None]
    if trace.keep.weights == "shape" or not partly:
        return {}
    nodes, found = trace.nodes, {}
    for below in nodes.subtree(number):
        path = nodes.fqns[below][len(nodes.fqns[number]) :].strip(".")
        for name, value in nodes.state_at(below, moment).parameters.items():
            ref = value.get("$parameter") if isinstance(value, dict) else None
            rows = trace.snapshots.taken[int(ref.key[1:])].rows if ref and ref.key else None
            if rows is not None:
                found[f"{path}.{name}".strip(".")] = (rows.count, rows.total)
    return found


def coverage_of(trace: Trace) -> CoverageList:
    """The fate of every requested module."""
    called = {c.number: c for c in trace.captures}
    return CoverageList(_fate(trace, number, called) for number in trace.targets)


def _fate(trace: Trace, number: int, called: dict[int, Capture]) -> Coverage:
    module, fqn = trace.nodes.modules[number], trace.nodes.fqns[number]
    cls = display_path(type(module))
    recomputes = sum(w.recomputes.get(number, 0) for w in trace.watches)
    failure = next((w.failures[number] for w in trace.watches if number in w.failures), "")
    capture = called.get(number)
    if failure:
        reason = f"could not be recorded: {failure}"
        return Coverage(fqn=fqn, cls=cls, fate=Fate.REFUSED, reason=reason, recomputes=recomputes)
    if capture is not None:
        return Coverage(
            fqn=fqn,
            cls=cls,
            fate=Fate.RECORDED,
            calls=len(capture.calls),
            dropped_calls=capture.dropped_calls,
            recomputes=recomputes,
            table_rows=capture.table_rows,
        )
    if not trace.watches:
        reason = "; ".join(trace.warnings) or "no step was traced"
        return Coverage(fqn=fqn, cls=cls, fate=Fate.NOT_CALLED, reason=reason)
    if any(w.counts[number] for w in trace.watches):
        reason = "its call did not return (an exception inside, or a step that ended within it)"
        return Coverage(fqn=fqn, cls=cls, fate=Fate.REFUSED, reason=reason)
    fate, reason = _uncalled(module)
    return Coverage(fqn=fqn, cls=cls, fate=fate, reason=reason, recomputes=recomputes)


def _uncalled(module: nn.Module) -> tuple[Fate, str]:
    forward = inspect.getattr_static(type(module), "forward", None)
    if forward is vars(nn.Module)["forward"] or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        members = ", ".join(list(module._modules)[:4])
        return Fate.NOT_CALLED, f"a container without a forward; its members are {members}"
    own = [p for p in module._parameters.values() if p is not None]
    if any(p.grad is not None for p in own):
        return (
            Fate.BYPASSED,
            "never called through __call__, though its parameters have gradients: "
            + ("its weights are used directly, or another method of it is called"),
        )
    return Fate.NOT_CALLED, "never called through __call__ in the traced step"
