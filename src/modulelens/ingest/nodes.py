"""Each module's own state -> one node: a JSON blob that names its children's nodes by digest."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from modulelens.capture.init import init_call
from modulelens.capture.nodes import Nodes, OwnState
from modulelens.capture.snapshot import Snapshots
from modulelens.ingest.bytes import Bytes, map_refs, union
from modulelens.records import Hook, InitCall, ModuleNode, Structure, TensorRef, to_json

_INTERN_BYTES = 512
_NAMED = re.compile(
    rb'"(?:cls|outer|\$class|\$function|\$enum|\$structseq)":\[?"([^\W\d]\w*)(?:\.\w+)*:'
)
_PLAIN = (bool, int, float, str, type(None))


class NodeWriter:
    """Writes nodes, each once.

    Args:
        nodes: The model's modules and their states.
        snapshots: Gives constructor arguments their references.
        stored: Where bytes go.
        keep: What to keep of a module's weights, by its number: "full" or "shape".
    """

    def __init__(
        self, nodes: Nodes, snapshots: Snapshots, stored: Bytes, keep: Callable[[int], str]
    ) -> None:
        self._nodes = nodes
        self._snapshots = snapshots
        self._stored = stored
        self._keep = keep
        self._written: dict[tuple[Any, ...], str] = {}
        self._open: list[int] = []
        self._interned: dict[bytes, str] = {}
        self._inits: dict[int, tuple[InitCall | None, set[str]]] = {}
        self.blobs: dict[str, frozenset[str]] = {}
        self.packages: dict[str, frozenset[str]] = {}

    def write(self, number: int, moment: int) -> str:
        """Digest of the module's node at a moment. `blobs[digest]` is all that it needs."""
        state = self._nodes.state_at(number, moment)
        self._open.append(number)
        children = {
            name: None if child < 0 else (self.write(child, moment), child)
            for name, child in state.children
        }
        held = (self._reference(other, moment).get("node") for other in state.held)
        key = (id(state), *children.values(), *held)
        digest = self._written.get(key)
        if digest is None:
            digest = self._written[key] = self._write(number, state, children, moment)
        self._open.pop()
        return digest

    def _write(self, number: int, state: OwnState, children: dict[str, Any], moment: int) -> str:
        outer, self._stored.used = self._stored.used, set()
        keep = self._keep(number)
        final = functools.partial(self.final, keep=keep, moment=moment)
        node = ModuleNode(
            cls=state.cls,
            number=number,
            fqn=self._nodes.fqns[number],
            training=state.training,
            parameters={k: final(v) for k, v in state.parameters.items()},
            buffers={k: final(v) for k, v in state.buffers.items()},
            non_persistent=state.non_persistent,
            attributes={k: self._intern(final(v)) for k, v in state.attributes.items()},
            children=children,
            parametrized=state.parametrized,
            hooks=tuple(Hook(**final(hook)) for hook in state.hooks) or None,
            foreign_hooks=state.foreign_hooks,
            opaque=state.opaque,
            init=self.init(number),
            refused=state.refused,
        )
        digest = self._put(to_json(node))
        below = [self.blobs[child[0]] for child in children.values() if child is not None]
        self.blobs[digest] = union([frozenset({digest}), frozenset(self._stored.used), *below])
        self._stored.used = outer
        return digest

    def init(self, number: int) -> InitCall | None:
        """The module's constructor call; its tensors are few and small, and always kept."""
        if number not in self._inits:
            outer, self._stored.used = self._stored.used, set()
            self._inits[number] = self._init(number), self._stored.used
            self._stored.used = outer
        call, used = self._inits[number]
        self._stored.used |= used
        return call

    def _init(self, number: int) -> InitCall | None:
        module = self._nodes.modules[number]
        call = init_call(module, self._snapshots.ref, self._nodes.refer)
        if call is None:
            return None
        args = [self._intern(self.final(v, keep="full")) for v in call.args]
        kwargs = {k: self._intern(self.final(v, keep="full")) for k, v in call.kwargs.items()}
        return InitCall(cls=call.cls, args=args, kwargs=kwargs, how=call.how)

    def final(self, value: Any, *, keep: str, moment: int | None = None) -> Structure:
        """The structure with references to stored bytes, and to nodes of a moment (the last)."""
        at = self._nodes.epoch if moment is None else moment

        def ref(found: TensorRef, part: bool) -> TensorRef:
            return self._stored.final(found, keep, part)

        return map_refs(value, ref, lambda number: self._reference(number, at))

    def _put(self, data: bytes) -> str:
        digest = self._stored.put(data)
        self.packages[digest] = packages_in(data)
        return digest

    def _intern(self, value: Structure) -> Structure:
        # A config hangs on every layer of a model: it is stored once.
        if not isinstance(value, dict) or "$object" not in value or _has_refs(value):
            return value
        data = to_json(value)
        if len(data) < _INTERN_BYTES:
            return value
        digest = self._interned.get(data)
        if digest is None:
            digest = self._interned[data] = self._put(data)
        self._stored.used.add(digest)
        return {"$intern": digest}

    def _reference(self, number: int, moment: int) -> dict[str, Any]:
        """A module inside a value: its node, or its plain scalars when it is an ancestor."""
        nodes = self._nodes
        cls = type(nodes.modules[number]).__qualname__
        found: dict[str, Any] = {"number": number, "fqn": nodes.fqns[number], "cls": cls}
        above = bool(self._open) and self._open[-1] in nodes.subtree(number)
        if above or number in self._open or not nodes.versions[number]:
            state = nodes.state_at(number, 0) if nodes.versions[number] else None
            attributes = state.attributes if state else {}
            return found | {
                "scalars": {k: v for k, v in attributes.items() if isinstance(v, _PLAIN)}
            }
        digest = self.write(number, moment)
        self._stored.used |= self.blobs[digest]
        return found | {"node": digest}


def packages_in(data: bytes) -> frozenset[str]:
    """Top-level packages of the classes and functions that JSON names; Python's own left out."""
    found = {name.decode() for name in _NAMED.findall(data)}
    return frozenset(found - sys.stdlib_module_names)


def _has_refs(value: Any) -> bool:
    if isinstance(value, TensorRef):
        return True
    if isinstance(value, dict):
        return "$module" in value or any(_has_refs(item) for item in value.values())
    return isinstance(value, list) and any(_has_refs(item) for item in value)
