"""A trace -> blobs, nodes and entry records. Joins `capture` and `store`; replays nothing.

Data flows so: every snapshot's shown bytes become one blob (or, when small and used by one entry
only, a tensor of that entry's `state.pt`); every module's own state becomes one node; every
capture becomes one record that names its node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from modulelens.capture import Capture, Trace
from modulelens.capture.gathered import FLAT
from modulelens.capture.nodes import LAZY, Nodes
from modulelens.capture.reach import reached
from modulelens.capture.seen import SeenCall
from modulelens.capture.source import source_of
from modulelens.capture.wrappers import clean_fqn, own_class
from modulelens.context import RngState
from modulelens.environment import is_own
from modulelens.errors import NotFound
from modulelens.ingest.budget import TENSORS, WEIGHTS, Budget
from modulelens.ingest.bytes import NODES, BlobStore, Bytes
from modulelens.ingest.nodes import NodeWriter, packages_in
from modulelens.records import (
    SCHEMA,
    Call,
    Context,
    CoverageList,
    Environment,
    Metadata,
    Rng,
    Structure,
    to_json,
)

_TENSOR_KEYS = frozenset({"$tensor", "$parameter"})
_PLAIN_KINDS = _TENSOR_KEYS | {
    "$tuple",
    "$dict",
    "$odict",
    "$float",
    "$int",
    "$str",
    "$size",
    "$dtype",
}


class Ingest:
    """Turns one trace into records.

    Args:
        trace: A finished trace.
        store: Where blobs go.

    Raises:
        NotFound: The trace holds nothing.
    """

    def __init__(self, trace: Trace, store: BlobStore) -> None:
        if not trace.captures:
            why = "; ".join(trace.warnings) or "no step was traced, or nothing asked for was called"
            raise NotFound(
                f"trace {trace.name!r} holds nothing to store: {why}", hint="see trace.coverage"
            )
        self._trace = trace
        self._stored = Bytes(trace.snapshots.taken, store)
        self._budget = Budget(trace.keep, self._stored.size_of)
        self._keep: str = trace.keep.tensors
        self._rngs: dict[RngState, tuple[Rng, set[str]]] = {}
        self._nodes = NodeWriter(trace.nodes, trace.snapshots, self._stored, self._budget.weights)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Writes the bytes of all snapshots. `progress` gets the size of each blob."""
        keep, nodes, stored = self._trace.keep, self._trace.nodes, self._stored
        for number, versions in enumerate(nodes.versions):
            weights: dict[int, set[int]] = {}
            for _, state in versions:
                own = (state.parameters, state.buffers, state.attributes, state.hooks)
                stored.note_users(weights, own, keep.weights, NODES)
            self._budget.spend(number, WEIGHTS, weights)
        for capture in self._trace.captures:
            wanted: dict[int, set[int]] = {}
            values: list[Any] = [capture.param_grads]
            for call in capture.calls:
                values += (call.args, call.kwargs, call.output, call.args_after, call.kwargs_after)
                values += (call.grad_output, call.grad_input)
            stored.note_users(wanted, values, keep.tensors, capture.number)
            self._budget.spend(capture.number, TENSORS, wanted)
        if self._budget.dropped:
            self._tell_dropped()
        stored.write(self._budget.users, progress)

    def _tell_dropped(self) -> None:
        """Names in `coverage` what did not fit, if not at the module then at those above it."""
        index = {fqn: number for number, fqn in reversed(list(enumerate(self._trace.nodes.fqns)))}
        told = []
        for item in self._trace.coverage:
            drops = self._dropped_in(index[item.fqn], besides=frozenset(self._trace.targets))
            reason = "; ".join(filter(None, (item.reason, *(text for text, _ in drops))))
            size = sum(nbytes for _, nbytes in drops)
            rows = self._kept_rows(item.fqn, item.table_rows)
            told.append(
                msgspec.structs.replace(item, reason=reason, dropped_bytes=size, table_rows=rows)
            )
        self._trace.coverage = CoverageList(told)

    def _kept_rows(self, fqn: str, rows: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Those of tables whose weights fit the limits."""
        if not (rows and self._budget.dropped):
            return rows
        fqns, dropped = self._trace.nodes.fqns, self._budget.dropped.items()
        without = {fqns[n] for n, told in dropped if any(what == WEIGHTS for _, what, _ in told)}
        owners = {name: f"{fqn}.{name}".strip(".").rpartition(".")[0] for name in rows}
        return {name: found for name, found in rows.items() if owners[name] not in without}

    def _dropped_in(self, number: int, besides: frozenset[int]) -> list[tuple[str, int]]:
        nodes, found = self._trace.nodes, []
        for below in nodes.subtree(number):
            if below == number or below not in besides:
                owner = "its" if below == number else f"{nodes.fqns[below]}'s"
                drops = self._budget.dropped.get(below, ())
                found += [(f"{text} {owner} {what}", size) for text, what, size in drops]
        return found

    def entries(self) -> list[tuple[Metadata, dict[str, Tensor]]]:
        """Each capture's record (without version) and the tensors of its `state.pt`."""
        made = [self._entry(capture) for capture in self._trace.captures]
        self._stored.flush()
        return made

    def _entry(self, capture: Capture) -> tuple[Metadata, dict[str, Tensor]]:
        trace, stored = self._trace, self._stored
        stored.used, stored.small = set(), {}
        self._keep = self._budget.tensors(capture.number)
        calls = tuple(self._call(i, call) for i, call in enumerate(capture.calls))
        for digest in {call.node for call in calls}:
            stored.used |= self._nodes.blobs[digest]
        gradients = {name: self._gradient(parts) for name, parts in capture.param_grads.items()}
        nodes = trace.nodes
        classes = {own_class(type(nodes.modules[n])) for n in nodes.reach(capture.number)}
        written = [c for c in classes if not c.__module__.startswith("torch.")]
        sources = map(source_of, written)
        cls = own_class(type(capture.module))
        packages = self._packages(classes, calls)
        metadata = Metadata(
            schema=SCHEMA,
            model=trace.name,
            fqn=capture.fqn,
            cls=f"{cls.__module__}:{cls.__qualname__}",
            wrapped_fqn=trace.wrapped_path(capture.number),
            created=trace.created,
            trace_id=trace.id,
            step=trace.first_step,
            moment=trace.moment,
            node=calls[0].node,
            depth=capture.fqn.count(".") + 1 if capture.fqn else 0,
            params=_count(nodes, capture.number),
            own_bytes=sum(stored.sizes[digest] for digest in stored.used),
            init=self._nodes.init(capture.number),
            source=source_of(cls),
            sources={s.path: s.digest for s in sources if s.digest},
            beside={k: v for c in written for k, v in sorted(reached(c).items())},
            environment=trace.environment or Environment(),
            calls=calls,
            dropped_calls=capture.dropped_calls,
            recomputes=capture.recomputes,
            param_grads=gradients,
            ties=self._ties(capture),
            table_rows=self._kept_rows(capture.fqn, capture.table_rows),
            packages=tuple(sorted(packages)),
            roots={p: root for p in packages if (root := _folder(p)) and is_own(root)},
            main_file=trace.main_file,
            blobs={digest: stored.sizes[digest] for digest in sorted(stored.used)},
            warnings=self._warnings(capture),
        )
        return metadata, stored.state()

    def _warnings(self, capture: Capture) -> tuple[str, ...]:
        found = [*self._trace.warnings, *(f"inside {w}" for w in self._trace.wrappers)]
        if self._budget.dropped:
            found += (text for text, _ in self._dropped_in(capture.number, besides=frozenset()))
        return tuple(found)

    def _call(self, index: int, call: SeenCall) -> Call:
        buffers, attributes, unclear = self._state_after(call)
        return Call(
            index=index,
            node=self._nodes.write(call.number, call.entered),
            context=Context(ambient=call.ambient, rng=self._rng(call.rng)),
            args=self._final(call.args),
            kwargs=self._final(call.kwargs),
            output=self._final(call.output),
            args_after=self._final(call.args_after),
            kwargs_after=self._final(call.kwargs_after),
            mutated=_changed_paths(call),
            buffers_after=buffers,
            attributes_after=attributes,
            grad_output={k: self._gradient(v) for k, v in call.grad_output.items()},
            grad_input={k: self._gradient(v) for k, v in call.grad_input.items()},
            step=call.step,
            thread=call.thread,
            method=call.method,
            nested=call.nested,
            notes=(*call.opaque, *call.opaque_output, *unclear),
        )

    def _final(self, value: Any) -> Structure:
        return self._nodes.final(value, keep=self._keep)

    def _rng(self, state: RngState) -> Rng:
        """The streams' record; calls between which nothing was drawn have one."""
        stored = self._stored
        if state not in self._rngs:
            outer, stored.used = stored.used, set()
            streams = (state.torch, state.numpy, state.python, state.devices)
            torch, numpy, python, devices = (
                self._nodes.final(_stream(value, self._trace.snapshots.ref), keep="full")
                for value in streams
            )
            rng = Rng(torch=torch, numpy=numpy, python=python, devices=devices)
            self._rngs[state] = rng, stored.used
            stored.used = outer
        rng, used = self._rngs[state]
        stored.used |= used
        return rng

    def _gradient(self, parts: list[Any]) -> Structure:
        return {"$sum": [self._final(part) for part in parts]}

    def _state_after(
        self, call: SeenCall
    ) -> tuple[dict[str, Structure], dict[str, Structure], list[str]]:
        """What of the state the call changed, by dotted name: tensors, plain values, and the rest.

        The rest are lines that say what cannot be compared.
        """
        tensors: dict[str, Structure] = {}
        plain: dict[str, Structure] = {}
        unclear: list[str] = []
        nodes = self._trace.nodes
        prefix = nodes.fqns[call.number]
        for number in nodes.reach(call.number):
            before, after = (nodes.state_at(number, m) for m in (call.entered, call.left))
            if before is after:
                continue
            if number not in nodes.subtree(call.number):
                held = type(nodes.modules[number]).__name__
                unclear.append(f"the call changed a {held} in a plain attribute: not compared")
                continue
            path = nodes.fqns[number][len(prefix) :].strip(".")
            own = after.parameters | after.buffers | after.attributes
            old_own = before.parameters | before.buffers | before.attributes
            for name, value in own.items():
                if value is None or old_own.get(name) == value:
                    continue
                dotted = f"{path}.{name}".strip(".")
                if not _is_plain(value):
                    unclear.append(f"the call changed {dotted}, which is not compared")
                    continue
                is_tensor = isinstance(value, dict) and not value.keys().isdisjoint(_TENSOR_KEYS)
                if is_tensor:
                    value = {k: v for k, v in value.items() if k != "vars"}
                kept = self._nodes.final(value, keep=self._budget.weights(number))
                (tensors if is_tensor else plain)[dotted] = kept
        return tensors, plain, unclear

    # ---- facts about the capture

    def _packages(self, classes: set[type], calls: tuple[Call, ...]) -> frozenset[str]:
        """Of the model's classes, and of all that the entry's values name."""
        own = {c.__module__.partition(".")[0] for c in (*classes, type(self._trace.model))}
        named = (self._nodes.packages.get(digest, frozenset()) for digest in self._stored.used)
        return packages_in(to_json(calls)).union(own, *named)

    @cached_property
    def _holders(self) -> dict[int, list[str]]:
        holders: dict[int, list[str]] = {}
        for name, parameter in self._trace.model.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), []).append(clean_fqn(name))
        return {key: names for key, names in holders.items() if len(names) > 1}

    def _ties(self, capture: Capture) -> dict[str, tuple[str, ...]]:
        """Parameter name -> the other names, in the whole model, of the same parameter."""
        if not self._holders:
            return {}
        prefix = f"{capture.fqn}." if capture.fqn else ""
        return {
            name: tuple(h for h in self._holders[id(p)] if h != prefix + name)
            for name, p in capture.module.named_parameters(remove_duplicate=False)
            if id(p) in self._holders
        }


def _count(nodes: Nodes, number: int) -> int:
    found: dict[object, int] = {}
    for module in (nodes.modules[below] for below in nodes.subtree(number)):
        flat = nodes.flat.get(id(module))
        found |= {(flat, name): size for name, size in (flat.sizes.items() if flat else ())}
        for name, p in module._parameters.items():
            if not (flat or p is None or isinstance(p, LAZY) or name == FLAT):
                found[id(p)] = p.numel()
    return sum(found.values())


def _stream(value: Any, ref: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return {"$tensor": ref(value)}
    if isinstance(value, tuple):
        return {"$tuple": [_stream(item, ref) for item in value]}
    return value


def _is_plain(value: Any) -> bool:
    """Whether it is made of tensors, numbers, texts and containers of them."""
    if isinstance(value, dict):
        kinds = {key for key in value if key.startswith("$")}
        return kinds <= _PLAIN_KINDS and all(map(_is_plain, value.values()))
    return not isinstance(value, list) or all(map(_is_plain, value))


def _changed_paths(call: SeenCall) -> tuple[str, ...]:
    if call.args_after is None:
        return ()

    def named(args: Any, kwargs: Any) -> dict[str, Any]:
        by_place = {f"args[{i}]": value for i, value in enumerate(args["$tuple"])}
        return by_place | {f"kwargs[{k!r}]": value for k, value in kwargs.items()}

    after = named(call.args_after, call.kwargs_after)
    before = named(call.args, call.kwargs)
    return tuple(name for name, value in before.items() if after.get(name) != value)


def _folder(package: str) -> str:
    """The folder that has to be on `sys.path` for importing the package."""
    module = sys.modules.get(package)
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return _parent(places[0]) if places[0] else ""


@cache
def _parent(file: str) -> str:
    return str(Path(file).resolve().parent)
