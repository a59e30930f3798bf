"""Each module's own state, versioned over the step.

Knows a model's modules and how one of them is encoded without its children. A module's state may
change at its own calls only (its hooks see that), so at any moment of the step the state of a
subtree is, per module, the last version noted.
"""

from __future__ import annotations

import bisect
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from modulelens.capture.gathered import FLAT, IN_SHARDS, Equal, Flat, fill
from modulelens.capture.init import KEY
from modulelens.capture.snapshot import Snapshots
from modulelens.capture.torchrec import Collection, Lookup, is_spread, sharded
from modulelens.capture.unchanged import Unchanged
from modulelens.capture.wrappers import (
    FRAMEWORK_KEYS,
    bare,
    clean_fqn,
    is_framework_hook,
    own_class,
)
from modulelens.errors import NotRebuildable
from modulelens.tree import Encoder, display_path, path_of
from modulelens.tree.encode import Known
from modulelens.tree.shards import divide_bias

LAZY = (UninitializedParameter, UninitializedBuffer)
_INTERNAL = frozenset(vars(nn.Module())) | {KEY, "_compiled_call_impl"}
_HOOK_DICTS = (
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ("_forward_hooks", "_forward_hooks_with_kwargs"),
)


@dataclasses.dataclass(frozen=True)
class OwnState:
    """One module's own state; two of them are equal when nothing changed in between.

    `children` and `held`, which are those that its attributes hold, are numbers of modules.
    """

    cls: str
    training: bool
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Any] = dataclasses.field(default_factory=dict)
    non_persistent: tuple[str, ...] = ()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    children: tuple[tuple[str, int], ...] = ()
    held: tuple[int, ...] = ()
    parametrized: tuple[str, ...] = ()
    hooks: tuple[Any, ...] = ()
    foreign_hooks: tuple[str, ...] = ()
    opaque: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: str = ""


class Nodes:
    """The modules of one model and the versions of their states.

    Args:
        root: The model.
        snapshots: Give tensors their references.
        own_hooks: Ids of hooks that the tracer installed; they are no part of the state.
        flat: By `id`, modules whose weights FSDP keeps in a flat parameter.

    Attributes:
        live: By number, modules that another one stands for in `modules`.
        inner: Numbers of modules inside those: nobody calls them.
    """

    def __init__(
        self,
        root: nn.Module,
        snapshots: Snapshots,
        own_hooks: set[int],
        flat: Mapping[int, Flat] = MappingProxyType({}),
    ) -> None:
        self.flat = flat
        self._snapshots = snapshots
        self._ref = snapshots.ref
        self._own_hooks = own_hooks
        self.modules: list[nn.Module] = []
        self.fqns: list[str] = []
        self.index: dict[int, int] = {}
        self.versions: list[list[tuple[int, OwnState]]] = []
        self.epoch = 0
        self._noting: set[int] = set()
        self._known: dict[int, Known] | None = None
        self._unchanged: dict[int, Unchanged] = {}
        self._links: dict[int, tuple[int, ...]] = {}
        self._reach: dict[int, list[int]] = {}
        self.live: dict[int, nn.Module] = {}
        self.inner: set[int] = set()
        self._current: set[int] = set()
        self.collections: dict[int, Collection] = {}
        self.lookups: dict[int, tuple[int, Lookup]] = {}
        self._weights: dict[int, Callable[[], Any]] = {}
        shells: tuple[str, ...] = ()
        for fqn, module in root.named_modules():
            if fqn.startswith(shells) or bare(module) is not module:
                continue  # a wrapped child is the module inside
            found = sharded(module)
            if found is None:
                self._add(module, clean_fqn(fqn))
            else:
                shells += (f"{fqn}." if fqn else "",)
                self._add_collection(found, clean_fqn(fqn))
        self._first, self._shells = len(self.modules), shells

    def _add(self, module: nn.Module, fqn: str) -> int:
        number = self.index[id(module)] = len(self.modules)
        self.modules.append(module)
        self.fqns.append(fqn)
        self.versions.append([])
        return number

    def late(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of the model that were put in place since; they had no part in the trace."""
        named = ((fqn, m) for fqn, m in root.named_modules() if not fqn.startswith(self._shells))
        found = ((clean_fqn(fqn), m) for fqn, m in named if bare(m) is m)
        return [(f, m) for f, m in found if self.index.get(id(m), self._first) >= self._first]

    def _add_collection(self, found: Collection, fqn: str) -> None:
        for live, plain, where in found.pairs():
            for name, module in plain.named_modules():
                self.inner.add(self._add(module, ".".join(filter(None, (fqn, where, name)))))
            number = self.index[id(live)] = self.index[id(plain)]
            self.inner.remove(number)
            self.live[number] = live
        owner = self.index[id(found.live)]
        self.collections[owner] = found
        self.lookups |= {self.index[id(each.live)]: (owner, each) for each in found.lookups}
        self._weights |= {self.index[id(module)]: made for module, made in found.weights}

    def note_tables(self, number: int, *, touched: bool) -> None:
        """Notes the present values of the tables of a sharded collection."""
        found = self.collections[number]
        if found.note(self._snapshots, touched=touched):
            self._current.difference_update(self.index[id(module)] for module in found.modules())

    def number(self, module: nn.Module) -> int:
        """The module's number; one outside the model's tree gets a new one and is noted now."""
        module = bare(module)
        found = self.index.get(id(module))
        if found is not None:
            return found
        number = self._add(module, "")
        self.note([number])
        for child in module.children():
            self.number(child)
        return number

    def note(self, numbers: Iterable[int]) -> int:
        """Notes the present state of these modules where it changed; returns the moment."""
        changed = []
        known = self._known
        self._known = {} if known is None else known
        try:
            for number in numbers:
                versions = self.versions[number]
                watch = self._unchanged.get(number)
                if number in self._current or (watch is not None and watch.still()):
                    continue
                state = self._state(number)
                if not versions or versions[-1][1] != state:
                    changed.append((versions, state))
        finally:
            self._known = known  # None: the user's code goes on, and may change what was known
        self.epoch += bool(changed)
        for versions, state in changed:
            versions.append((self.epoch, state))
        return self.epoch

    def state_at(self, number: int, moment: int) -> OwnState:
        """The module's own state at a moment that `note` returned (its first one if later)."""
        versions = self.versions[number]
        place = bisect.bisect_right(versions, moment, key=lambda v: v[0]) - 1
        return versions[max(place, 0)][1]

    def fill_shards(self) -> None:
        """Gives moments at which a weight lay in shards what it was gathered to for its next use.

        FSDP gathers a layer's weights for the time of its own calls; who calls it sees shards.
        """
        equal = Equal(self._snapshots.taken)
        for versions in self.versions:
            fill(versions, equal)

    def forget_live(self) -> None:
        """Drops what was held for telling changes."""
        self._unchanged.clear()

    def subtree(self, number: int) -> list[int]:
        """The numbers of the module and all modules below it."""
        found = [self.index[id(m)] for m in self.modules[number].modules() if id(m) in self.index]
        for below in [n for n in found if n != number and n in self.collections]:
            found += self.subtree(below)[1:]
        return found

    def reach(self, number: int) -> list[int]:
        """The subtree, the module first, and what plain attributes in it hold, but owners of it."""
        found = self._reach.get(number)
        if found is None:
            found = self._reach[number] = self.subtree(number)
            for each in found:  # it grows
                for held in self._links.get(each, ()):
                    below = self.subtree(held) if held not in found else []
                    found += [n for n in below if number not in below and n not in found]
        return found

    def _link(self, number: int, state: OwnState) -> None:
        links = (*(child for _, child in state.children if child >= 0), *state.held)
        if self._links.get(number) != links:
            self._links[number] = links
            self._reach.clear()

    def _state(self, number: int) -> OwnState:
        module = self.modules[number]
        if refused := _stateless(module):
            return _unreadable(module, refused)
        try:
            state = self._own(module, self._weights.get(number))
            self._link(number, state)
            if number in self.inner or number in self.live:  # `note_tables` sees all changes
                self._current.add(number)
            else:
                self._unchanged[number] = Unchanged(module, self._snapshots.touched)
        except NotRebuildable as error:
            return _unreadable(module, f"{error.reason}: {error.message}")
        except Exception as error:  # noqa: BLE001 - boundary: runs inside the user's step
            why = f"its state cannot be read: {type(error).__name__}: {error}"
            return _unreadable(module, f"opaque_attribute: {why}")
        return state

    def _own(self, module: nn.Module, weight: Callable[[], Any] | None = None) -> OwnState:
        inside = vars(module)
        encoder = Encoder(self._ref, self.refer, self._known)
        parameters, in_shards = self._parameters(module, encoder)
        if weight is not None:
            parameters["weight"] = weight()
        buffers = {name: encoder.encode(value) for name, value in inside["_buffers"].items()}
        attributes: dict[str, Any] = {}
        opaque: dict[str, str] = {}
        flat = self.flat.get(id(module))
        hidden = _INTERNAL.union(flat.sizes if flat else ())
        for name, value in inside.items():
            if name in hidden or name.startswith(FRAMEWORK_KEYS):
                continue
            seen = len(encoder.opaque)
            attributes[name] = Encoder.encode(encoder, value)
            if len(encoder.opaque) > seen:
                opaque[name] = encoder.opaque[seen]
        children = tuple(
            (n, -1 if c is None else self.number(c)) for n, c in inside["_modules"].items()
        )
        hooks, foreign = self._hooks(inside)
        parametrized: tuple[str, ...] = ()
        if parametrize.is_parametrized(module):
            parametrized = tuple(inside["_modules"]["parametrizations"])
        cls = own_class(type(module))
        return OwnState(
            cls=display_path(cls),
            training=inside["training"],
            parameters=parameters,
            buffers=buffers,
            non_persistent=tuple(sorted(inside["_non_persistent_buffers_set"])),
            attributes=attributes,
            children=children,
            held=tuple(dict.fromkeys(_modules_in((attributes, hooks)))),
            parametrized=parametrized,
            hooks=hooks,
            foreign_hooks=foreign,
            opaque=opaque,
            refused=in_shards or _refusal(module, cls, opaque.get("forward")),
        )

    def _parameters(self, module: nn.Module, encoder: Encoder) -> tuple[dict[str, Any], str]:
        """The module's own, and why they cannot be had now; empty where they can."""
        found = {n: p for n, p in module._parameters.items() if n != FLAT}
        flat = self.flat.get(id(module))
        if flat is None:
            whole = {name: encoder.encode(value) for name, value in found.items()}
            if own_class(type(module)) is nn.Linear:
                divide_bias(whole)
            return whole, ""
        shard = flat.shard()
        own = {n: encoder.encode(p) for n, p in found.items() if n not in flat.sizes}
        if shard is not None:  # tells the moments apart, for `fill_shards`
            return own | {FLAT: {"$tensor": self._ref(shard)}}, IN_SHARDS
        for name, view in flat.weights(module):
            ref = msgspec.structs.replace(self._ref(view), leaf=True)  # it stands for a parameter
            own[name] = {"$parameter": ref}
        return own, ""

    def weights(self, number: int) -> Iterator[tuple[str, Any]]:
        """The live parameters of its own that gradients arrive at."""
        module = self.modules[number]
        flat = self.flat.get(id(module))
        if flat is None:
            for name, found in module._parameters.items():
                usable = found is not None and not isinstance(found, LAZY) and found.is_leaf
                if usable and name != FLAT:
                    yield name, found
        elif flat.shard() is None:
            yield from flat.weights(module)

    def refer(self, module: nn.Module) -> Any:
        """The module's JSON where a value holds it. Its state is noted if that wasn't done yet."""
        number = self.number(module)
        if not self.versions[number] and number not in self._noting:
            self._noting.add(number)
            self.note([number])
            self._noting.discard(number)
        return {"number": number}

    def _hooks(self, inside: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        kept, foreign = [], []
        for kind, kwargs_kind in _HOOK_DICTS:
            for hook_id, hook in inside[kind].items():
                if hook_id in self._own_hooks or is_framework_hook(hook):
                    continue
                encoder = Encoder(self._ref, module=self.refer)
                encoded = encoder.encode(hook)
                if encoder.opaque:
                    foreign.append(getattr(hook, "__qualname__", type(hook).__qualname__))
                else:
                    kept.append(
                        {"kind": kind, "kwargs": hook_id in inside[kwargs_kind], "hook": encoded}
                    )
        return tuple(kept), tuple(foreign)


def _modules_in(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        if "$module" in value:
            yield value["$module"]["number"]
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        yield from _modules_in(item)


def has_weight_hooks(module: nn.Module) -> bool:
    """Whether a pre-hook of `torch.nn.utils` (legacy weight or spectral norm) sets its weights."""
    return any(
        type(h).__module__.startswith("torch.nn.utils.") for h in module._forward_pre_hooks.values()
    )


def _unreadable(module: nn.Module, refused: str) -> OwnState:
    cls = display_path(own_class(type(module)))
    return OwnState(cls=cls, training=module.training, refused=refused)


def _stateless(module: nn.Module) -> str:
    """Why nothing of the module can be read at all; empty where it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "script: a ScriptModule has no Python class to rebuild from; trace it unscripted"
    if is_spread(module):
        return f"sharded: there is no rule for {type(module).__name__}, which lies on several ranks"
    return ""


def _refusal(module: nn.Module, cls: type, forward: str | None) -> str:
    if any(isinstance(p, LAZY) for p in module._parameters.values()):
        return (
            "uninitialized: lazy parameters before the first call; trace a later step (warmup >= 1)"
        )
    if forward is not None:
        return f"opaque_attribute: forward was replaced on the instance: {forward}"
    return _class_refusal(cls)


def _class_refusal(cls: type) -> str:
    if any(vars(base).get("__slots__") for base in cls.__mro__):
        return f"opaque_attribute: {cls.__qualname__} has __slots__, whose values are not kept"
    if path_of(cls) is not None:
        return ""
    where = "inside a function" if "<locals>" in cls.__qualname__ else "at run time"
    if hasattr(sys.modules.get(cls.__module__), cls.__qualname__):
        where = "again since this module was made: make it anew"
    return f"not_importable: class {cls.__qualname__} is not importable (defined {where})"
