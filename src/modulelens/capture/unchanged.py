"""Tells cheaply that a module's own state is what it was. Knows identities, encodes nothing.

A module is looked at twice per call, and hardly ever changed. Values that cannot change are
compared by identity; lists, dicts and plain objects by the identities of what they hold, all the
way down; tensors by their snapshot. What cannot be watched that way is said to have changed.
"""

from __future__ import annotations

import enum
import itertools
import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from modulelens.capture.init import KEY

#: Values that cannot change, or whose change is seen elsewhere: a child module has its own state.
_FIXED: tuple[type, ...] = (
    *(int, float, str, bytes, complex, type(None), type, enum.Enum, weakref.ref, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_FIXED_TYPES = frozenset((*_FIXED, bool))
_SEQUENCES = frozenset((list, set))
_MOST_CONTAINERS = 128
_SLOTS = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")


class Unchanged:
    """One module's state at the moment of making.

    Args:
        module: The module.
        touched: Whether a tensor was changed in any way since this moment.
    """

    __slots__ = ("_containers", "_held", "_sizes", "_tensors", "_touched", "watched")

    def __init__(self, module: nn.Module, touched: Callable[[Tensor], bool]) -> None:
        self._touched = touched
        self._containers: list[Collection[Any]] = []
        self._tensors: list[Tensor] = []
        self.watched = True
        inside = vars(module)
        self._watch_dict(inside)
        for name in _SLOTS:
            self._watch_dict(inside[name])
        for slots in (inside["_parameters"], inside["_buffers"]):
            self._tensors.extend(tensor for tensor in slots.values() if tensor is not None)
        for parameter in inside["_parameters"].values():
            if parameter is None:
                continue
            self._watch_dict(vars(parameter))
            for value in list(vars(parameter).values()):
                self._watch(value)
        for name, value in inside.items():
            if name not in _MODULE_KEYS:
                self._watch(value)
        self._sizes = [*map(len, self._containers)]
        self._held = [*itertools.chain.from_iterable(self._containers)]

    def still(self) -> bool:
        """Whether nothing changed since."""
        inside = itertools.chain.from_iterable(self._containers)
        return (
            self.watched
            and [*map(len, self._containers)] == self._sizes
            and all(map(operator.is_, inside, self._held))
            and not any(map(self._touched, self._tensors))
        )

    def _watch(self, value: Any) -> None:
        kind = type(value)
        if kind in _FIXED_TYPES or not self.watched or isinstance(value, _FIXED):
            return
        if isinstance(value, Tensor):
            self._tensors.append(value)
        elif kind in (tuple, frozenset):
            for item in value:
                self._watch(item)
        elif kind in _SEQUENCES:
            self._watch_all(value, value)
        elif kind in (dict, OrderedDict):
            self._watch_all(value, value.values())
        elif _is_plain_object(value):
            inside = vars(value)
            self._watch_all(inside, inside.values())
        else:
            self.watched = False

    def _watch_all(self, container: Any, items: Any) -> None:
        if any(container is known for known in self._containers):
            return
        if len(self._containers) >= _MOST_CONTAINERS:
            self.watched = False
            return
        if type(container) in _SEQUENCES:
            self._containers.append(container)
        else:
            self._watch_dict(container)
        for item in list(items):
            self._watch(item)

    def _watch_dict(self, container: dict[Any, Any]) -> None:
        self._containers += container, container.values()


def _is_plain_object(value: Any) -> bool:
    cls = type(value)
    inside = getattr(value, "__dict__", None)
    return (
        type(inside) is dict
        and cls.__basicsize__ <= _PLAIN_SIZE
        and not any("__slots__" in vars(base) for base in cls.__mro__[:-1])
    )


class _Plain:
    pass


_PLAIN_SIZE = _Plain.__basicsize__
_MODULE_KEYS = frozenset(vars(nn.Module())) | {KEY}
