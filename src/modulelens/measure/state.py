"""What a run can change in a module, and how to put it back. Knows no inputs and no random streams.

Tensors are watched per storage by copy-on-write: while nobody wrote, snapshot and storage are the
same memory, which is also how an untouched storage is recognised at no cost.
"""

from __future__ import annotations

import collections
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modulelens.measure.compare import compare
from modulelens.measure.untouched import untouched
from modulelens.records import Status
from modulelens.tree import flatten, is_plain

_MAX_DEPTH = 8
_address: Any = getattr(torch._C, "_data_address")  # noqa: B009 - missing in torch's stubs
#: Sources of random numbers: how to read and how to set one.
_STREAMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda stream: stream.bit_generator.state,
        lambda stream, state: setattr(stream.bit_generator, "state", state),
    ),
}
_KINDS = ("_parameters", "_buffers", "_modules")
_GONE = object()
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


class ModuleState:
    """A module's state at one moment: tensors, attributes, flags, containers.

    Covers the whole subtree: parameters and what hangs on them, buffers, plain tensor attributes,
    `training` flags, attributes that were added, removed or replaced, the content of lists, dicts,
    sets and plain objects hanging on it, hooks, and random sources of torch, numpy and Python.
    Native objects, and those of Python's and torch's own classes, are not covered.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}
        self._streams: list[tuple[Callable[[Any, Any], object], Any, Any]] = []
        self._seen: dict[int, object] = {}
        self._module = module
        if module is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._walk(module, 0)

    @property
    def tensors(self) -> list[Tensor]:
        """The live tensors of the module, each object once."""
        return [tensor for tensor, _ in self._tensors]

    @untouched
    def written(self) -> list[Tensor]:
        """The live tensors whose storage holds other bytes now."""
        changed = {
            key
            for key, (live, snapshot) in self._storages.items()
            if _address(live) != _address(snapshot) and not torch.equal(live, snapshot)
        }
        return [t for t, _ in self._tensors if t.untyped_storage()._cdata in changed]

    @untouched
    def changed(self) -> dict[str, bool]:
        """Dotted name of each child, parameter, buffer and attribute -> whether it is another now.

        It was written to, moved, replaced or removed; an equal value in its place is none, except
        where modules and parameters are told by their identity. A method that an attribute hides
        by now is listed as `name()`.
        """
        written = set(map(id, self.written()))
        other = {id(t) for t, alias in self._tensors if id(t) in written or _moved(t, alias)}
        other |= {id(c) for c, content in self._containers if not _holds(c, content)}
        saved = {id(c): content for c, content in self._containers}
        slots = () if self._module is None else _slots(self._module, saved, "")
        return {name: _is_other(then, now, other) for name, then, now in slots}

    def restore(self) -> None:
        """Puts everything back bit for bit, keeping every object's identity; clears `.grad`."""
        with torch.inference_mode(False), torch.no_grad():
            for container, saved in self._containers:
                _refill(container, saved)
            for tensor, alias in self._tensors:
                _restore_tensor(tensor, alias)
            for live, snapshot in self._storages.values():
                if _address(live) != _address(snapshot):
                    live.copy_(snapshot)
            for restore, stream, state in self._streams:
                restore(stream, state)

    def _walk(self, value: Any, depth: int) -> None:
        if isinstance(value, _ATOMS) or depth > _MAX_DEPTH or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._keep_tensor(value)
            self._keep(vars(value), depth)
        elif isinstance(value, nn.Module):
            self._keep(vars(value), 0)
        elif isinstance(value, dict | list | set | collections.deque):
            self._keep(value, depth)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self._walk(item, depth + 1)
        elif type(value) in _STREAMS:
            read, restore = _STREAMS[type(value)]
            self._streams.append((restore, value, read(value)))
        elif _is_plain_object(value):
            self._keep(vars(value), depth)

    def _keep(self, container: Any, depth: int) -> None:
        saved = _content(container)
        self._containers.append((container, saved))
        for item in saved:
            self._walk(item, depth + 1)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if not is_plain(tensor):
            for part in flatten(tensor).tensors:
                self._keep_storage(part)
            return
        self._tensors.append((tensor, tensor.detach().requires_grad_(tensor.requires_grad)))
        self._keep_storage(tensor)

    def _keep_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages or tensor.is_meta or not storage.nbytes():
            return
        live = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        try:
            snapshot = torch._lazy_clone(live)
        except RuntimeError:  # memory that torch does not own: numpy's, a mapped file's
            snapshot = live.clone()
        self._storages[storage._cdata] = live, snapshot


def _is_plain_object(value: Any) -> bool:
    """An instance of somebody's own class. Python's and torch's own hold locks, caches, handles."""
    package = type(value).__module__.partition(".")[0]
    own = package != "torch" and package not in sys.stdlib_module_names
    plain = own or isinstance(value, types.SimpleNamespace)
    return plain and isinstance(getattr(value, "__dict__", None), dict)


def _content(container: Any) -> list[Any]:
    """Its items; of a dict, keys and values in turn."""
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _pairs(content: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(content[::2], content[1::2], strict=True)


def _slots(
    module: nn.Module, saved: dict[int, list[Any]], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """Name, value then, value now of all that hangs on the module and those below it."""
    own = dict(_pairs(saved.pop(id(vars(module)), [])))  # once, where a module is shared
    for kind, then in own.items():
        now = vars(module).get(kind, _GONE)
        if kind not in _KINDS:
            yield prefix + kind, then, now
            continue
        for name, value in _pairs(saved[id(then)]):
            yield prefix + name, value, now.get(name, _GONE)
            if isinstance(value, nn.Module):
                yield from _slots(value, saved, f"{prefix}{name}.")
    for name in vars(module).keys() - own.keys() if own else ():
        if callable(getattr(type(module), name, None)):
            yield f"{prefix}{name}()", _GONE, vars(module)[name]


def _is_other(then: Any, now: Any, other: set[int]) -> bool:
    if then is now:
        held = vars(now) if _is_plain_object(now) else now
        return not isinstance(now, nn.Module) and id(held) in other
    known = isinstance(then, nn.Module | nn.Parameter) or then is _GONE or now is _GONE
    return known or compare(then, now)[0].status is not Status.EXACT


def _holds(container: Any, saved: list[Any]) -> bool:
    now = _content(container)
    return len(now) == len(saved) and all(map(operator.is_, now, saved))


def _refill(container: Any, saved: list[Any]) -> None:
    if _holds(container, saved):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(_pairs(saved))
    else:
        (container.update if isinstance(container, set) else container.extend)(saved)


def _restore_tensor(tensor: Tensor, alias: Tensor) -> None:
    if _place(tensor) != _place(alias):
        tensor.data = alias.detach()
    if tensor.is_leaf:
        tensor.grad = None
        if tensor.requires_grad is not alias.requires_grad:
            tensor.requires_grad_(alias.requires_grad)


def _moved(tensor: Tensor, alias: Tensor) -> bool:
    """Whether it shows other memory with other values, or asks for a gradient otherwise."""
    if tensor.requires_grad is not alias.requires_grad:
        return True
    elsewhere = _place(tensor) != _place(alias)
    return elsewhere and compare(alias, tensor)[0].status is not Status.EXACT


def _place(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
