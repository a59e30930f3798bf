"""A trace -> blobs, nodes and entry records. Joins `capture` and `store`; replays nothing.

Data flows so: every snapshot's shown bytes become one blob (or, when small and used by one entry
only, a tensor of that entry's `state.pt`); every module's own state becomes one node, a JSON blob
that names its children's nodes by digest; every capture becomes one record that names its node.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from modulelens.capture import Capture, Trace
from modulelens.capture.init import init_call
from modulelens.capture.nodes import OwnState
from modulelens.capture.snapshot import Snapshot
from modulelens.capture.source import source_of
from modulelens.capture.watch import SeenCall
from modulelens.errors import NotFound
from modulelens.records import (
    SCHEMA,
    Call,
    Context,
    Environment,
    InitCall,
    Metadata,
    ModuleNode,
    Rng,
    SourceRef,
    Structure,
    TensorRef,
    to_json,
)
from modulelens.tree import dtype_of
from modulelens.tree.stats import value_stats

_ALIGN = 64
_SMALL_BYTES = 64 << 10
_KEPT_INTEGERS = 1 << 16
_INTERN_BYTES = 512
_INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"})


class BlobStore(Protocol):
    """Where bytes go."""

    def put_blobs(
        self, buffers: Sequence[Any], *, progress: Callable[[int], None] | None = None
    ) -> list[str]:
        """Stores buffers; returns their digests in order."""
        ...


class Ingest:
    """Turns one trace into records. `entries` gives each with the small tensors it owns."""

    def __init__(self, trace: Trace, store: BlobStore) -> None:
        if not trace.captures:
            why = "; ".join(trace.warnings) or "no step was traced, or no requested module was called"
            raise NotFound(f"trace {trace.name!r} holds nothing to store: {why}", hint="see trace.coverage")
        self._trace = trace
        self._store = store
        self._digests: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        self._nodes: dict[tuple[int, ...], str] = {}
        self._node_blobs: dict[str, frozenset[str]] = {}
        self._open: list[int] = []
        self._interned: dict[bytes, str] = {}
        self._used: set[str] = set()
        self._small: dict[str, int] | None = None
        self._spent = 0

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Writes the bytes of all snapshots that anything needs. `progress` gets bytes written."""
        users = self._snapshot_users()
        snapshots = self._trace.snapshots.taken
        self._owned = {n for n, who in users.items() if len(who) == 1 and -1 not in who and _size(snapshots[n]) <= _SMALL_BYTES}
        wanted = [n for n in users if n not in self._owned]
        for number in users:
            snapshots[number].settle()
        digests = self._store.put_blobs([_view(snapshots[n]) for n in wanted], progress=progress)
        for number, digest in zip(wanted, digests, strict=True):
            self._digests[number] = digest
            self._sizes[digest] = _size(snapshots[number])

    def _snapshot_users(self) -> dict[int, set[int]]:
        """Snapshot number -> the captures whose calls use it; -1 stands for nodes."""
        users: dict[int, set[int]] = {}
        keep, nodes = self._trace.keep, self._trace.nodes
        for number in range(len(nodes.modules)):
            for _, state in nodes.versions[number]:
                for ref in _refs([state.parameters, state.buffers, state.attributes, list(state.hooks)]):
                    if _keeps(ref, keep.weights):
                        users.setdefault(int((ref.key or "")[1:]), set()).add(-1)
        for capture in self._trace.captures:
            for ref in _call_refs(capture):
                if _keeps(ref, keep.tensors):
                    users.setdefault(int((ref.key or "")[1:]), set()).add(capture.number)
        return users

    # ---- entries

    def entries(self) -> Iterator[tuple[Metadata, dict[str, Tensor]]]:
        """Each capture's record (without version) and the tensors of its `state.pt`."""
        for capture in self._trace.captures:
            yield self._entry(capture)

    def _entry(self, capture: Capture) -> tuple[Metadata, dict[str, Tensor]]:
        trace = self._trace
        self._used, self._small = set(), {}
        calls = tuple(self._call(i, call) for i, call in enumerate(capture.calls))
        source = source_of(_plain_class(type(capture.module)))
        gradients = {name: self._gradient(parts) for name, parts in capture.param_grads.items()}
        packages, roots = self._packages(capture)
        node = calls[0].node
        for digest in {call.node for call in calls}:
            self._used |= self._node_blobs[digest]
        metadata = Metadata(
            schema=SCHEMA,
            model=trace.name,
            fqn=capture.fqn,
            cls=_class_name(capture),
            created=trace.created,
            trace_id=trace.id,
            node=node,
            depth=capture.fqn.count(".") + 1 if capture.fqn else 0,
            params=sum(p.numel() for p in capture.module.parameters() if not _lazy(p)),
            own_bytes=sum(self._sizes.get(digest, 0) for digest in self._used),
            init=self._init(capture.number),
            source=source,
            sources=self._sources(capture),
            environment=trace.environment or Environment(),
            calls=calls,
            dropped_calls=capture.dropped_calls,
            recomputes=capture.recomputes,
            param_grads=gradients,
            ties=self._ties(capture),
            packages=packages,
            roots=roots,
            main_file=_main_file(),
            blobs={digest: self._sizes[digest] for digest in sorted(self._used)},
            warnings=tuple(trace.warnings) + tuple(f"inside {w}" for w in trace.wrappers),
        )
        snapshots = trace.snapshots.taken
        state = {key: _tensor(snapshots[number]) for key, number in self._small.items()}
        return metadata, state

    def _call(self, index: int, call: SeenCall) -> Call:
        nodes, keep = self._trace.nodes, self._trace.keep.tensors
        rng = call.rng
        changed = args_after = kwargs_after = None
        if call.args_after is not None:
            args_after, kwargs_after = self._final(call.args_after, keep), self._final(call.kwargs_after, keep)
            changed = _changed_paths(call)
        return Call(
            index=index,
            node=self._node(call.number, call.entered),
            context=Context(
                ambient=call.ambient,
                rng=Rng(torch=self._rng(rng.torch), numpy=self._rng(rng.numpy), python=self._rng(rng.python), devices=self._rng(rng.devices)),
            ),
            args=self._final(call.args, keep),
            kwargs=self._final(call.kwargs, keep),
            output=self._final(call.output, keep),
            args_after=args_after,
            kwargs_after=kwargs_after,
            mutated=tuple(changed or ()),
            buffers_after=self._buffers_after(call, nodes),
            grad_output={k: self._gradient(v) for k, v in call.grad_output.items()},
            grad_input={k: self._gradient(v) for k, v in call.grad_input.items()},
            step=call.step,
            thread=call.thread,
            flags=tuple(call.flags),
            notes=tuple([*call.opaque, *call.opaque_output]),
        )

    def _rng(self, value: Any) -> Structure:
        return self._final(_rng_structure(value, self._trace.snapshots.ref), "full")

    def _gradient(self, parts: list[Any]) -> Structure:
        return {"$sum": [self._final(part, self._trace.keep.tensors) for part in parts]}

    def _buffers_after(self, call: SeenCall, nodes: Any) -> dict[str, Structure]:
        found: dict[str, Structure] = {}
        prefix = nodes.fqns[call.number]
        for number in nodes.subtree(call.number):
            before, after = nodes.state_at(number, call.entered), nodes.state_at(number, call.left)
            if before is after:
                continue
            path = nodes.fqns[number][len(prefix) :].strip(".")
            for name, value in {**after.buffers, **_tensor_attributes(after.attributes)}.items():
                old = before.buffers.get(name, before.attributes.get(name))
                if value is not None and old != value:
                    found[f"{path}.{name}".strip(".")] = self._final(value, self._trace.keep.weights)
        return found

    # ---- nodes

    def _node(self, number: int, moment: int) -> str:
        nodes = self._trace.nodes
        state = nodes.state_at(number, moment)
        self._open.append(number)
        children = {
            name: None if child < 0 else (self._node(child, moment), child) for name, child in state.children
        }
        key = (id(state), *(hash(c) for c in children.values()))
        digest = self._nodes.get(key)
        if digest is None:
            digest = self._nodes[key] = self._write_node(number, state, children)
        self._open.pop()
        return digest

    def _write_node(self, number: int, state: OwnState, children: dict[str, Any]) -> str:
        outer, self._used = self._used, set()
        keep = self._trace.keep.weights
        node = ModuleNode(
            cls=state.cls,
            number=number,
            fqn=self._trace.nodes.fqns[number],
            training=state.training,
            parameters={k: self._final(v, keep) for k, v in state.parameters.items()},
            buffers={k: self._final(v, keep) for k, v in state.buffers.items()},
            non_persistent=state.non_persistent,
            attributes={k: self._intern(self._final(v, keep)) for k, v in state.attributes.items()},
            children=children,
            parametrized=state.parametrized,
            hooks=[self._final(hook, keep) for hook in state.hooks] or None,
            foreign_hooks=state.foreign_hooks,
            opaque=state.opaque,
            init=self._init(number),
            refused=state.refused,
        )
        data = to_json(node)
        (digest,) = self._store.put_blobs([data])
        self._sizes[digest] = len(data)
        below = [self._node_blobs[child[0]] for child in children.values() if child is not None]
        self._node_blobs[digest] = frozenset({digest}).union(self._used, *below)
        self._used = outer
        return digest

    def _init(self, number: int) -> InitCall | None:
        trace = self._trace
        module = trace.nodes.modules[number]
        call = init_call(module, trace.snapshots.ref, lambda m: {"number": trace.nodes.number(m)})
        if call is None:
            return None
        # Its tensors are few and small: they go into the node itself.
        kept = {k: self._intern(self._final(v, "full")) for k, v in call.kwargs.items()}
        args = [self._intern(self._final(v, "full")) for v in call.args]
        return InitCall(cls=call.cls, args=args, kwargs=kept, how=call.how)

    def _intern(self, value: Structure) -> Structure:
        if not isinstance(value, dict) or "$object" not in value or any(True for _ in _refs(value)):
            return value
        data = to_json(value)
        if len(data) < _INTERN_BYTES:
            return value
        digest = self._interned.get(data)
        if digest is None:
            (digest,) = self._store.put_blobs([data])
            self._interned[data] = digest
            self._sizes[digest] = len(data)
        self._used.add(digest)
        return {"$intern": digest}

    # ---- final references

    def _final(self, value: Any, keep: str) -> Structure:
        """The structure with references that name stored bytes instead of snapshots."""
        if isinstance(value, TensorRef):
            return self._final_ref(value, keep)
        if isinstance(value, list):
            return [self._final(item, keep) for item in value]
        if not isinstance(value, dict):
            return value
        if "$module" in value and "number" in value["$module"]:
            return {"$module": self._module_reference(value["$module"]["number"])}
        return {key: self._final(item, keep) for key, item in value.items()}

    def _final_ref(self, ref: TensorRef, keep: str) -> TensorRef:
        if ref.key is None:
            return ref
        number = int(ref.key[1:])
        snapshot = self._trace.snapshots.taken[number]
        if not _keeps(ref, keep):
            stats = value_stats(_as_tensor(ref, snapshot))
            return msgspec.structs.replace(ref, key=None, nbytes=0, stats=stats)
        if number not in self._digests and number not in self._owned:
            self._late(number, snapshot)
        low, size = _low(snapshot), _size(snapshot)
        offset = ref.offset - low // dtype_of(ref.spec.dtype).itemsize
        if number in self._digests:
            self._used.add(self._digests[number])
            return msgspec.structs.replace(ref, key=None, blob=self._digests[number], offset=offset, nbytes=size)
        assert self._small is not None
        key = f"t{number}"
        self._small[key] = number
        return msgspec.structs.replace(ref, key=key, offset=offset, nbytes=size)

    def _late(self, number: int, snapshot: Snapshot) -> None:
        # Random streams and constructor arguments are given their references while storing.
        snapshot.settle()
        (digest,) = self._store.put_blobs([_view(snapshot)])
        self._digests[number] = digest
        self._sizes[digest] = _size(snapshot)

    def _module_reference(self, number: int) -> dict[str, Any]:
        nodes = self._trace.nodes
        reference: dict[str, Any] = {"number": number, "fqn": nodes.fqns[number], "cls": type(nodes.modules[number]).__qualname__}
        inside = bool(self._open) and self._open[-1] in nodes.subtree(number)
        if inside or number in self._open or not nodes.versions[number]:
            state = nodes.state_at(number, 0) if nodes.versions[number] else None
            plain = (bool, int, float, str, type(None))
            reference["scalars"] = {k: v for k, v in (state.attributes if state else {}).items() if isinstance(v, plain)}
            return reference
        digest = self._node(number, nodes.epoch)
        self._used |= self._node_blobs[digest]
        return reference | {"node": digest}

    # ---- facts about the capture

    def _sources(self, capture: Capture) -> dict[str, str]:
        classes = {_plain_class(type(m)) for m in capture.module.modules()}
        sources = [source_of(c) for c in classes if not c.__module__.startswith("torch.")]
        return {s.path: s.digest for s in sources if s.digest}

    def _packages(self, capture: Capture) -> tuple[tuple[str, ...], dict[str, str]]:
        classes = {_plain_class(type(m)) for m in (*capture.module.modules(), self._trace.model)}
        packages = {c.__module__.partition(".")[0]: source_of(c) for c in classes}
        roots = {name: s.root for name, s in packages.items() if s.root and not _installed(s)}
        return tuple(sorted(packages)), roots

    def _ties(self, capture: Capture) -> dict[str, tuple[str, ...]]:
        """Parameter name -> the other names, in the whole model, of the same parameter."""
        named = self._trace.model.named_parameters(remove_duplicate=False)
        holders: dict[int, list[str]] = {}
        for name, parameter in named:
            holders.setdefault(id(parameter), []).append(name)
        prefix = f"{capture.fqn}." if capture.fqn else ""
        return {
            name: tuple(h for h in holders[id(p)] if h != prefix + name)
            for name, p in capture.module.named_parameters()
            if len(holders.get(id(p), ())) > 1
        }


def _refs(value: Any) -> Iterator[TensorRef]:
    if isinstance(value, TensorRef):
        if value.key is not None:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _refs(item)


def _call_refs(capture: Capture) -> Iterator[TensorRef]:
    for call in capture.calls:
        yield from _refs([call.args, call.kwargs, call.output, call.args_after, call.kwargs_after])
        yield from _refs([call.grad_output, call.grad_input])
    yield from _refs(capture.param_grads)


def _keeps(ref: TensorRef, keep: str) -> bool:
    return keep == "full" or (ref.spec.dtype in _INTEGERS and ref.spec.numel <= _KEPT_INTEGERS)


def _low(snapshot: Snapshot) -> int:
    return snapshot.low // _ALIGN * _ALIGN if snapshot.high else 0


def _size(snapshot: Snapshot) -> int:
    return max(snapshot.high - _low(snapshot), 0) if snapshot.high else 0


def _view(snapshot: Snapshot) -> Any:
    size = _size(snapshot)
    if not size:
        return b""
    # Through the address: asking torch for a writable buffer would copy pages that are shared.
    plain = torch.empty(0, dtype=torch.uint8).set_(snapshot.data)
    start: int = torch._C._data_address(plain) + _low(snapshot) - snapshot.start  # type: ignore[attr-defined]
    return memoryview((ctypes.c_ubyte * size).from_address(start)).cast("B")


def _tensor(snapshot: Snapshot) -> Tensor:
    return torch.frombuffer(bytearray(_view(snapshot)) or bytearray(1), dtype=torch.uint8)[: _size(snapshot)].clone()


def _as_tensor(ref: TensorRef, snapshot: Snapshot) -> Tensor:
    dtype = dtype_of(ref.spec.dtype)
    offset = ref.offset - snapshot.start // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(snapshot.data, offset, ref.spec.shape, ref.spec.stride)


def _rng_structure(value: Any, ref: Callable[[Tensor], TensorRef]) -> Any:
    if isinstance(value, Tensor):
        return {"$tensor": ref(value)}
    if isinstance(value, tuple):
        return {"$tuple": [_rng_structure(item, ref) for item in value]}
    return value


def _tensor_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in attributes.items() if isinstance(v, dict) and "$tensor" in v}


def _changed_paths(call: SeenCall) -> list[str]:
    names = [f"args[{i}]" for i in range(len(call.args["$tuple"]))]
    before = dict(zip(names, call.args["$tuple"], strict=True)) | {f"kwargs[{k!r}]": v for k, v in call.kwargs.items()}
    after = dict(zip(names, call.args_after["$tuple"], strict=False)) | {f"kwargs[{k!r}]": v for k, v in call.kwargs_after.items()}
    return [name for name, value in before.items() if after.get(name) != value]


def _plain_class(cls: type) -> type:
    return cls.__mro__[1] if cls.__name__.startswith("Parametrized") and cls.__module__.startswith("torch.") else cls


def _class_name(capture: Capture) -> str:
    cls = _plain_class(type(capture.module))
    return f"{cls.__module__}:{cls.__qualname__}"


def _lazy(parameter: Any) -> bool:
    return isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin)


def _installed(source: SourceRef) -> bool:
    paths = sysconfig.get_paths()
    return any(source.file.startswith(paths[name]) for name in ("purelib", "platlib", "stdlib"))


def _main_file() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve()) if file else ""
