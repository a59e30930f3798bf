"""One module of one trace, and the fate of every requested module. Knows no hooks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from modulelens.capture.seen import OUTSIDE, SeenCall
from modulelens.capture.select import matches, other_methods
from modulelens.capture.wrappers import clean_fqn, of_framework, own_class
from modulelens.records import Coverage, CoverageList, Fate, tensor_refs
from modulelens.tree import display_path

if TYPE_CHECKING:
    from modulelens.capture.trace import Trace

_LATE = "made or put in place within the traced step, so not recorded: trace a later one"
_INNER = "its table is looked up by the sharded collection, as a whole"
_NOT_RETURNED = "its call did not return (an exception inside, or a step that ended within it)"
_STANDS_IN = "an attribute of that name on the object stands in for it; trace before it"
_NO_GRADIENT = (
    "no gradient arrived: backward did not run before it ended, and the next outermost call ends"
    " it; for a backward over several calls trace a module that makes them"
)
_REGISTERS = frozenset(vars(nn.Module()))


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
    partly = trace.keep.weights == "full" and any(s.rows is not None for s in trace.snapshots.taken)
    return [
        Capture(
            number=number,
            fqn=nodes.fqns[number],
            cls=display_path(own_class(type(nodes.modules[number]))),
            module=nodes.modules[number],
            calls=by_number[number],
            dropped_calls=sum(max(w.counts[number] - w.keep.max_calls, 0) for w in trace.watches),
            recomputes=sum(w.recomputes.get(number, 0) for w in trace.watches),
            param_grads=_param_grads(trace, number),
            table_rows=_table_rows(trace, number, by_number[number][0].entered) if partly else {},
        )
        for number in trace.targets
        if number in by_number
    ]


def _param_grads(trace: Trace, number: int) -> dict[str, Any]:
    if not trace.keep.grads or not trace.watches:
        return {}
    watch, nodes = trace.watches[0], trace.nodes
    arrived = watch.gradients.of_parameters
    paths = {n: nodes.fqns[n][len(nodes.fqns[number]) :].strip(".") for n in nodes.subtree(number)}
    return {
        f"{paths[owner]}.{name}".strip("."): [g for key in found for g in arrived[key]]
        for (owner, name), keys in watch.grad_places.items()
        if owner in paths and (found := [key for key in keys if key in arrived])
    }


def _table_rows(trace: Trace, number: int, moment: int) -> dict[str, tuple[int, int]]:
    nodes, found = trace.nodes, {}
    for below in nodes.subtree(number):
        path = nodes.fqns[below][len(nodes.fqns[number]) :].strip(".")
        for name, value in nodes.state_at(below, moment).parameters.items():
            refs = [*tensor_refs(value, "$parameter"), *tensor_refs(value)]
            taken = [trace.snapshots.taken[int(ref.key[1:])].rows for ref in refs if ref.key]
            if rows := [each for each in taken if each is not None]:
                counts = sum(each.count for each in rows), sum(each.total for each in rows)
                found[f"{path}.{name}".strip(".")] = counts
    return found


def coverage_of(trace: Trace) -> CoverageList:
    """The fate of every requested module."""
    called = {c.number: c for c in trace.captures}
    late = [
        Coverage(fqn=fqn, cls=display_path(type(module)), fate=Fate.NOT_CALLED, reason=_LATE)
        for fqn, module in trace.nodes.late(trace.model)
        if matches(fqn, module, trace.patterns)
    ]
    return CoverageList([*(_fate(trace, number, called) for number in trace.targets), *late])


def _fate(trace: Trace, number: int, called: dict[int, Capture]) -> Coverage:
    module, fqn = trace.nodes.modules[number], trace.nodes.fqns[number]
    recomputes = sum(w.recomputes.get(number, 0) for w in trace.watches)
    failure = next((w.failures[number] for w in trace.watches if number in w.failures), "")
    cls = display_path(own_class(type(module)))
    told = functools.partial(Coverage, fqn=fqn, cls=cls, recomputes=recomputes)
    if failure:
        return told(fate=Fate.REFUSED, reason=f"could not be recorded: {failure}")
    if capture := called.get(number):
        calls, dropped, rows = len(capture.calls), capture.dropped_calls, capture.table_rows
        return told(fate=Fate.RECORDED, calls=calls, dropped_calls=dropped, table_rows=rows)
    if number in trace.nodes.inner:
        return told(fate=Fate.NOT_CALLED, reason=_INNER)
    if not trace.watches:
        reason = "; ".join(trace.warnings) or "no step was traced"
        return told(fate=Fate.NOT_CALLED, reason=reason)
    if any(w.counts[number] for w in trace.watches):
        return told(fate=Fate.REFUSED, reason=_NOT_RETURNED)
    fate, reason = _within(trace, number, called) or _uncalled(module, fqn)
    return told(fate=fate, reason=reason)


def _within(trace: Trace, number: int, called: dict[int, Capture]) -> tuple[Fate, str] | None:
    """Why a module was not called that is part of a script, or of a module of torch's own."""
    nodes = trace.nodes
    above = [n for n in called if n != number and number in nodes.subtree(n)]
    parent = max(above, key=lambda n: len(nodes.fqns[n]), default=None)
    if parent is None or len(called.keys() & set(nodes.subtree(parent))) > 1:
        return None
    module = nodes.modules[parent]
    name = f"{nodes.fqns[parent] or 'the model'} ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        return Fate.BYPASSED, f"{name} is a script: what runs inside it cannot be seen"
    if type(module).__module__.startswith("torch.nn."):
        return Fate.BYPASSED, f"{name} ran as one fused operation on its weights: it calls no child"
    return None


def _uncalled(module: nn.Module, fqn: str) -> tuple[Fate, str]:
    methods = other_methods(type(module))[:4]
    also = f"; methods={methods} records calls of its other methods" if methods else ""
    forward = inspect.getattr_static(type(module), "forward", None)
    if forward is vars(nn.Module)["forward"] or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        members = [f"{fqn}.{name}".strip(".") for name in [*module._modules, *module._parameters]]
        return Fate.NOT_CALLED, f"it has no forward; it holds {', '.join(members[:4])}{also}"
    if any(p is not None and p.grad is not None for p in module._parameters.values()):
        why = "its weights are used directly, or another method of it is called"
        text = f"never called through __call__, though its parameters have gradients: {why}"
        return Fate.BYPASSED, text + also
    return Fate.NOT_CALLED, f"never called through __call__ in the traced step{also}"


def missed(trace: Trace) -> list[str]:
    """What was asked for besides modules and did not come: methods, and gradients."""
    heard = {(call.number, call.method) for watch in trace.watches for call in watch.calls}
    counts = [count for watch in trace.watches for count in watch.counts.items()]
    full = {number for number, count in counts if count > trace.keep.max_calls}
    found = []
    for number in trace.methods.keys() - full:
        inside, fqn = vars(trace.nodes.modules[number]), trace.nodes.fqns[number] or "the model"
        for name in trace.methods[number]:
            if (number, name) not in heard:
                why = _STANDS_IN if name in inside else "not called by its name in the steps"
                found.append(f"no call of {name!r} of {fqn} was recorded: {why}")
    for watch in trace.watches:
        told = (watch.failures.get(OUTSIDE), _NO_GRADIENT if watch.gradients.awaited else None)
        found += (f"traced step {watch.step}: {text}" for text in told if text)
    return sorted(found)


def unregistered(model: nn.Module) -> list[str]:
    """Paths of modules and parameters that sit in plain attributes, lists, tuples and dicts only.

    No optimizer and no `state_dict` of the model knows them.
    """
    known = {id(each) for each in (*model.modules(), *model.parameters())}
    return [
        f"{clean_fqn(fqn)}{path}".strip(".")
        for fqn, module in model.named_modules()
        if not of_framework(own_class(type(module)))
        for name, value in vars(module).items()
        if name not in _REGISTERS
        for path, item in _items(f".{name}", value)
        if issubclass(type(item), (nn.Module, nn.Parameter)) and id(item) not in known
    ]


def _items(path: str, value: Any) -> list[tuple[str, Any]]:
    kind = type(value)  # isinstance would ask the value's own class
    if issubclass(kind, dict):
        return [(f"{path}[{key!r}]", item) for key, item in value.items()]
    if issubclass(kind, (list, tuple)):
        return [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    return [(path, value)]
