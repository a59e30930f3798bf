"""Live Python values -> the closed JSON grammar. Knows kinds of values, not where tensors go.

Plain JSON stands for itself; everything else is an object with one key that starts with `$`
(`docs/format.md` lists them). Mutable containers and objects are numbered in the order in which
they are met; a second meeting gives `{"$ref": number}`. Tensors are handed to a callable.
"""

from __future__ import annotations

import base64
import collections
import enum
import functools
import inspect
import logging
import math
import pathlib
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulelens.errors import NotRebuildable
from modulelens.tree.decode import Opaque
from modulelens.tree.functions import local_path
from modulelens.tree.names import display_path, path_of
from modulelens.tree.objects import attributes_of, data_base, no_object_rule, slots_of
from modulelens.tree.tensors import dtype_name, encode_special, is_parameter, is_plain

_MAX_DEPTH = 120
_JSON_INT = 1 << 62
_INLINE_BYTES = 1024


class Encoder:
    """Encodes values of one session: numbers for shared containers run through it.

    Args:
        tensor: A plain strided tensor -> its JSON.
        module: An `nn.Module` met inside a value -> its JSON; None refuses modules.
        limit: Most nodes that one session may write, a guard against objects that drag in the
            whole process.
    """

    def __init__(
        self,
        tensor: Callable[[Tensor], Any],
        module: Callable[[torch.nn.Module], Any] | None = None,
        limit: int = 200_000,
    ) -> None:
        self._tensor = tensor
        self._module = module
        self._left = limit
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self.opaque: list[str] = []

    @property
    def count(self) -> int:
        """Number of mutable containers and objects met so far."""
        return len(self._numbers)

    def encode(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON. What has no rule becomes `$opaque` with the reason; never raises."""
        rule = _EXACT.get(type(value))
        if rule is None:
            return (
                value if value is None or type(value) in _AS_THEY_ARE else self._slow(value, depth)
            )
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            return self._refuse(value, "too deep or too large to be an argument")
        return rule(self, value, depth)

    def _slow(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            return self._refuse(value, "too deep or too large to be an argument")
        for kind, rule in _BY_BASE:
            if isinstance(value, kind):
                return rule(self, value, depth)
        return self._object(value, depth)

    def _refuse(self, value: Any, why: str) -> dict[str, Any]:
        kind = display_path(type(value))
        self.opaque.append(f"{kind}: {why}")
        return {"$opaque": {"type": kind, "why": why}}

    def _still_opaque(self, value: Opaque, depth: int) -> dict[str, Any]:  # noqa: ARG002
        self.opaque.append(f"{value.kind}: {value.why}")
        return {"$opaque": {"type": value.kind, "why": value.why}}

    def _number(self, value: Any) -> dict[str, int] | None:
        number = self._numbers.get(id(value))
        if number is not None:
            return {"$ref": number}
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return None

    # ---- containers

    def _list(self, value: list[Any], depth: int) -> Any:
        return self._number(value) or [self.encode(item, depth + 1) for item in value]

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        return {"$tuple": [self.encode(item, depth + 1) for item in value]}

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        seen = self._number(value)
        if seen is not None:
            return seen
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
            return {key: self.encode(item, depth + 1) for key, item in value.items()}
        return {"$dict": self._pairs(value, depth)}

    def _pairs(self, value: Any, depth: int) -> list[list[Any]]:
        return [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()]

    def _set(self, value: Any, depth: int) -> Any:
        items = [self.encode(item, depth + 1) for item in value]
        return {"$frozenset" if isinstance(value, frozenset) else "$set": items}

    def _float(self, value: float, depth: int) -> Any:  # noqa: ARG002
        return value if math.isfinite(value) else {"$float": repr(value)}

    def _int(self, value: int, depth: int) -> Any:  # noqa: ARG002
        return value if -_JSON_INT < value < _JSON_INT else {"$int": str(value)}

    def _str(self, value: str, depth: int) -> Any:  # noqa: ARG002
        return value if value.isascii() else _text(value)

    # ---- torch

    def _any_tensor(self, value: Tensor, depth: int) -> Any:
        if is_plain(value):
            if not is_parameter(value):
                return {"$tensor": self._tensor(value)}
            found = {"$parameter": self._tensor(value)}
            extra = value.__dict__
            if extra:
                kept = {
                    k: v for k, v in extra.items() if not callable(v) and not isinstance(v, Tensor)
                }
                found["vars"] = self.encode(kept, depth + 1)
            return found
        try:
            plain = lambda t: self._any_tensor(t, depth + 1)  # noqa: E731
            return encode_special(value, plain, lambda v: self.encode(v, depth + 1))
        except NotRebuildable as error:
            return self._refuse(value, error.message)
        except Exception as error:  # noqa: BLE001 - boundary: a subclass of somebody else's
            return self._refuse(value, f"{type(error).__name__}: {error}")

    def _nn_module(self, value: torch.nn.Module, depth: int) -> Any:  # noqa: ARG002
        if self._module is None:
            return self._refuse(value, "a module in this place cannot be kept")
        return {"$module": self._module(value)}

    def _generator(self, value: torch.Generator, depth: int) -> Any:
        return {
            "$generator": {
                "device": str(value.device),
                "state": self.encode(value.get_state(), depth + 1),
            }
        }

    # ---- names

    def _named(self, value: Any, depth: int) -> Any:
        path = path_of(value)
        if path is not None:
            return {"$class" if isinstance(value, type) else "$function": path}
        if isinstance(value, types.MethodType) or (
            isinstance(value, types.BuiltinMethodType)
            and not isinstance(value.__self__, types.ModuleType)
        ):
            owner = self.encode(value.__self__, depth + 1)
            if isinstance(value, types.MethodType) and not is_own_method(value):
                return {"$bound": [owner, self.encode(value.__func__, depth + 1)]}
            return {"$method": [owner, value.__name__]}
        local = local_path(value) if isinstance(value, types.FunctionType) else None
        if local is not None:
            return self._number(value) or {"$local": local | self._enclosed(value, depth)}
        code = getattr(value, "__code__", None)
        where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
        name = getattr(value, "__qualname__", type(value).__name__)
        what = "a lambda" if "<lambda>" in name else f"{name!r}, which has no importable name,"
        return self._refuse(value, f"{what}{where}")

    def _enclosed(self, value: types.FunctionType, depth: int) -> dict[str, Any]:
        cells = [c.cell_contents for c in value.__closure__ or ()]
        defaults = (value.__defaults__, value.__kwdefaults__)
        return {
            "cells": [self.encode(item, depth + 1) for item in cells],
            "defaults": [self.encode(item, depth + 1) for item in defaults],
        }

    def _partial(self, value: functools.partial[Any], depth: int) -> Any:
        if type(value) is not functools.partial:
            return self._refuse(value, "a subclass of functools.partial")
        parts = (value.func, list(value.args), dict(value.keywords))
        return {"$partial": [self.encode(part, depth + 1) for part in parts]}

    def _enum(self, value: enum.Enum, depth: int) -> Any:
        path = path_of(type(value))
        if path is None:
            return self._refuse(value, "its enum class has no importable name")
        if isinstance(value, enum.Flag):  # a combination has no name that can be looked up
            return {"$flag": [path, self.encode(value.value, depth + 1)]}
        return {"$enum": [path, value.name]}

    def _weakref(self, value: weakref.ref[Any], depth: int) -> Any:
        return {"$weakref": self.encode(value(), depth + 1)}

    # ---- numpy and random

    def _ndarray(self, value: np.ndarray[Any, Any], depth: int) -> Any:
        if type(value) is not np.ndarray or value.dtype.hasobject or value.dtype.names:
            return self._refuse(value, f"a numpy array of dtype {value.dtype}")
        data = (
            np.ascontiguousarray(value).view(np.uint8)
            if value.ndim
            else value.reshape(1).view(np.uint8)
        )
        # A large one is kept as a tensor is; a small one in place, so that equal states stay equal.
        flat = np.array(data).reshape(-1)
        plain = torch.from_numpy(flat) if flat.nbytes > _INLINE_BYTES else flat.tobytes()
        body = {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "data": self.encode(plain, depth + 1),
        }
        return self._number(value) or {"$ndarray": body}

    def _np_scalar(self, value: np.generic, depth: int) -> Any:  # noqa: ARG002
        if value.dtype.hasobject:
            return self._refuse(value, "a numpy object scalar")
        return {"$npscalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}

    def _np_random(self, value: Any, depth: int) -> Any:
        legacy = isinstance(value, np.random.RandomState)
        state = value.get_state(legacy=False) if legacy else value.bit_generator.state
        return {"$nprandom": {"legacy": legacy, "state": self.encode(state, depth + 1)}}

    def _py_random(self, value: random.Random, depth: int) -> Any:
        if type(value) is not random.Random:
            return self._refuse(value, "a random source of its own kind")
        return self._number(value) or {"$pyrandom": self.encode(value.getstate(), depth + 1)}

    # ---- everything else: class path + vars + slots + items

    def _object(self, value: Any, depth: int) -> Any:
        cls = type(value)
        path = path_of(cls)
        if path and issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):
            return {"$structseq": [path, [self.encode(item, depth + 1) for item in value]]}
        why = no_object_rule(cls, path)
        if why:
            return self._refuse(value, why)
        seen = self._number(value)
        if seen is not None:
            return seen
        body: dict[str, Any] = {"cls": path}
        base = data_base(cls)
        if base is dict:
            body["items"] = [
                [self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in dict.items(value)
            ]
        elif base in (list, tuple, set, frozenset):
            body["items"] = [self.encode(item, depth + 1) for item in base.__iter__(value)]
        elif base is not None:
            body["value"] = self.encode(base(value), depth + 1)
        attributes = attributes_of(value)
        if attributes:
            body["vars"] = {_text_key(k): self.encode(v, depth + 1) for k, v in attributes.items()}
        slots = slots_of(value)
        if slots:
            body["slots"] = {name: self.encode(item, depth + 1) for name, item in slots.items()}
        return {"$object": body}


def _is_text(value: str) -> bool:
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:  # lone surrogates are no JSON
        return False
    return True


def is_own_method(method: types.MethodType) -> bool:
    """Whether its owner's class has it under its name; else it was bound by hand."""
    owner = method.__self__
    cls = owner if isinstance(owner, type) else type(owner)
    found = inspect.getattr_static(cls, method.__name__, None)
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    return found is method.__func__


def _text(value: str) -> Any:
    if _is_text(value):
        return value
    return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}


def _text_key(key: str) -> str:
    return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()


def _const(text: str) -> Callable[[Encoder, Any, int], Any]:
    return lambda _e, _v, _d: {"$const": text}


Rule = Callable[[Encoder, Any, int], Any]
_AS_THEY_ARE = frozenset({bool})
_EXACT: dict[type, Rule] = {
    int: Encoder._int,
    float: Encoder._float,
    str: Encoder._str,
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    set: Encoder._set,
    frozenset: Encoder._set,
    Tensor: Encoder._any_tensor,
    torch.nn.Parameter: Encoder._any_tensor,
    type(...): _const("Ellipsis"),
    type(NotImplemented): _const("NotImplemented"),
    complex: lambda e, v, d: {"$complex": [e._float(v.real, d), e._float(v.imag, d)]},
    bytes: lambda _e, v, _d: {"$bytes": base64.b64encode(v).decode()},
    bytearray: lambda _e, v, _d: {"$bytearray": base64.b64encode(v).decode()},
    slice: lambda e, v, d: {"$slice": [e.encode(x, d + 1) for x in (v.start, v.stop, v.step)]},
    range: lambda _e, v, _d: {"$range": [v.start, v.stop, v.step]},
    torch.Size: lambda _e, v, _d: {"$size": [int(x) for x in v]},
    torch.dtype: lambda _e, v, _d: {"$dtype": dtype_name(v)},
    torch.device: lambda _e, v, _d: {"$device": str(v)},
    torch.layout: lambda _e, v, _d: {"$torch": str(v).removeprefix("torch.")},
    torch.memory_format: lambda _e, v, _d: {"$torch": str(v).removeprefix("torch.")},
    torch.qscheme: lambda _e, v, _d: {"$torch": str(v).removeprefix("torch.")},
    torch.Generator: Encoder._generator,
    collections.OrderedDict: lambda e, v, d: e._number(v) or {"$odict": e._pairs(v, d)},
    collections.defaultdict: lambda e, v, d: (
        e._number(v) or {"$ddict": [e.encode(v.default_factory, d + 1), e._pairs(v, d)]}
    ),
    collections.deque: lambda e, v, d: (
        e._number(v) or {"$deque": [[e.encode(x, d + 1) for x in v], v.maxlen]}
    ),
    types.MappingProxyType: lambda e, v, d: {"$mapping": e._pairs(v, d)},
    functools.partial: Encoder._partial,
    weakref.ref: Encoder._weakref,
    np.ndarray: Encoder._ndarray,
    random.Random: Encoder._py_random,
    Opaque: Encoder._still_opaque,
    torch.utils.hooks.RemovableHandle: lambda _e, _v, _d: {"$dropped": "hook handle"},
    type(threading.Lock()): lambda _e, _v, _d: {"$lock": "Lock"},
    type(threading.RLock()): lambda _e, _v, _d: {"$lock": "RLock"},
}
_BY_BASE: list[tuple[Any, Rule]] = [
    (Tensor, Encoder._any_tensor),
    (torch.nn.Module, Encoder._nn_module),
    (enum.Enum, Encoder._enum),
    (
        (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc),
        Encoder._named,
    ),
    (
        (types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType),
        Encoder._named,
    ),
    (functools.partial, Encoder._partial),
    (np.generic, Encoder._np_scalar),
    (np.dtype, lambda _e, v, _d: {"$npdtype": v.str}),
    (np.ndarray, Encoder._ndarray),
    ((np.random.RandomState, np.random.Generator), Encoder._np_random),
    (pathlib.PurePath, lambda _e, v, _d: {"$path": str(v)}),
    (logging.Logger, lambda _e, v, _d: {"$logger": v.name}),
    (types.ModuleType, lambda _e, v, _d: {"$pymodule": v.__name__}),
    (random.Random, Encoder._py_random),
]
