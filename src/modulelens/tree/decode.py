"""The closed JSON grammar -> live Python values. Calls nothing that the record names.

Classes are imported from allowed packages; objects are made without their constructor and given
their attributes. Containers are numbered in the order in which they were written.
"""

from __future__ import annotations

import base64
import collections
import enum
import functools
import inspect
import logging
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

from modulelens.errors import Corrupted, ModuleLensError, NotRebuildable
from modulelens.records import Structure, TensorRef, as_ref
from modulelens.tree.functions import make_local
from modulelens.tree.names import Importer
from modulelens.tree.tensors import SPECIAL_KINDS, decode_special, dtype_of

#: Deeper than what the encoder writes, and far from the interpreter's own limit.
_MAX_DEPTH = 150
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}
_TORCH_NAMES = frozenset(
    {
        "strided",
        "sparse_coo",
        "sparse_csr",
        "sparse_csc",
        "sparse_bsr",
        "sparse_bsc",
        "_mkldnn",
        "jagged",
    }
    | {"contiguous_format", "channels_last", "channels_last_3d", "preserve_format"}
    | {"per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric"}
    | {"per_channel_affine_float_qparams"}
)
_STRUCT_SEQUENCES = frozenset({"torch.return_types", "time", "os", "sys"})
_BIT_GENERATORS: dict[str, Any] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}
_IMMUTABLE = (tuple, frozenset, str, bytes, int, float)
_MUTABLE = (collections.OrderedDict, dict, list, set, types.SimpleNamespace)
_CALLABLE_TYPES = (types.FunctionType, types.BuiltinFunctionType, type, np.ufunc)


class Opaque:
    """Stands for a value that could not be kept. Printing it says why; using it fails clearly."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        self.why = why

    def __repr__(self) -> str:
        return f"<not kept: {self.kind}: {self.why}>"


class Decoder:
    """Decodes structures of one session.

    Args:
        tensor: A `TensorRef` -> a tensor.
        importer: Imports classes and functions that the record names.
        module: The body of a `$module` -> a module; None refuses modules.
        device: Where `$device` and `$generator` values point to; None keeps them.
        strict: Raise at `$opaque` values instead of leaving an `Opaque` in their place.
    """

    def __init__(
        self,
        tensor: Callable[[TensorRef], Tensor],
        importer: Importer,
        module: Callable[[Any], torch.nn.Module] | None = None,
        device: str | None = None,
        strict: str = "",
    ) -> None:
        self._tensor = tensor
        self._module = module
        self.importer = importer
        self.device = device
        self.strict = strict
        self._numbered: list[Any] = []
        self._depth = 0

    def decode(self, node: Structure) -> Any:
        """The value of a structure.

        Raises:
            NotRebuildable: A class is not allowed, or an opaque value under `strict`.
            ClassNotFound: A class cannot be imported here.
            Corrupted: The structure does not follow the grammar.
        """
        if not isinstance(node, (list, dict)):
            return node
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                raise Corrupted(f"a value is nested more than {_MAX_DEPTH} deep")
            return self._container(node)
        finally:
            self._depth -= 1

    def _container(self, node: list[Any] | dict[str, Any]) -> Any:
        if isinstance(node, list):
            made: list[Any] = self._keep([])
            made.extend(self.decode(item) for item in node)
            return made
        key = next(iter(node), None)
        if key is None or not key.startswith("$"):
            plain: dict[str, Any] = self._keep({})
            plain.update((name, self.decode(item)) for name, item in node.items())
            return plain
        try:
            return self._special(key, node)
        except ModuleLensError:
            raise
        except Exception as error:  # boundary: what a record says goes to foreign constructors
            raise Corrupted(
                f"a {key} value cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _special(self, key: str, node: dict[str, Any]) -> Any:
        body = node[key]
        if key in ("$tensor", "$parameter"):
            return self._any_tensor(body, node)
        if key in SPECIAL_KINDS:
            return decode_special(key, body, self.decode, self.importer)
        rule = _RULES.get(key)
        if rule is None:
            raise Corrupted(
                f"unknown kind of value {key!r}", hint="pip install --upgrade modulelens"
            )
        return rule(self, body)

    def _keep(self, value: Any) -> Any:
        self._numbered.append(value)
        return value

    def _any_tensor(self, body: Any, node: dict[str, Any]) -> Tensor:
        made = self._tensor(as_ref(body))
        if "$parameter" in node and not isinstance(made, torch.nn.Parameter):
            # In place: other references to this object stay the same parameter (tied weights).
            made.__class__ = torch.nn.Parameter
        if "vars" in node:
            vars(made).update(self.decode(node["vars"]))
        return made

    def _pairs(self, target: Any, pairs: list[Any]) -> Any:
        for key, item in pairs:
            name = self.decode(key)
            target[name] = self.decode(item)
        return target

    def _object(self, body: dict[str, Any]) -> Any:
        cls = self.importer.get(body["cls"])
        if not isinstance(cls, type) or issubclass(cls, torch.nn.Module):
            raise NotRebuildable(
                f"{body['cls']} is no class for plain data", reason="untrusted_class"
            )
        if issubclass(cls, (tuple, frozenset)) or "value" in body:
            # Immutable: its items come first, so its own number is taken before them.
            place = len(self._numbered)
            self._numbered.append(None)
            base: Any = next(b for b in _IMMUTABLE if issubclass(cls, b))
            content = (
                self.decode(body["value"])
                if "value" in body
                else [self.decode(i) for i in body["items"]]
            )
            made = self._numbered[place] = base.__new__(cls, content)
        else:
            base = next((b for b in _MUTABLE if issubclass(cls, b)), object)
            made = self._keep(base.__new__(cls))
            self._fill_items(made, base, body)
        if "vars" in body:
            values = object.__getattribute__(made, "__dict__")
            values.update((name, self.decode(item)) for name, item in body["vars"].items())
        for name, item in body.get("slots", {}).items():
            object.__setattr__(made, name, self.decode(item))
        return made

    def _fill_items(self, made: Any, base: Any, body: dict[str, Any]) -> None:
        for item in body.get("items", ()):
            if issubclass(base, dict):
                key, value = self.decode(item[0]), self.decode(item[1])
                base.__setitem__(made, key, value)
            else:
                add: Any = list.append if base is list else set.add
                add(made, self.decode(item))

    def _opaque(self, body: dict[str, Any]) -> Opaque:
        if self.strict:
            raise NotRebuildable(
                f"{self.strict} holds {body['type']}: {body['why']}", reason="opaque_argument"
            )
        return Opaque(body["type"], body["why"])

    def _function(self, path: str) -> Any:
        found = self.importer.get(path)
        if not isinstance(found, _CALLABLE_TYPES) and not callable(found):
            raise NotRebuildable(f"{path} is no function", reason="untrusted_class")
        return found

    def _local(self, body: dict[str, Any]) -> Any:
        made, cells = make_local(body, self.importer)
        self._keep(made)
        for cell, item in zip(cells, body["cells"], strict=True):
            cell.cell_contents = self.decode(item)
        made.__defaults__, made.__kwdefaults__ = map(self.decode, body["defaults"])
        return made

    def _method(self, body: list[Any]) -> Any:
        owner, name = self.decode(body[0]), body[1]
        cls = owner if isinstance(owner, type) else type(owner)
        if isinstance(inspect.getattr_static(cls, name, None), (property, types.NoneType)):
            raise NotRebuildable(
                f"{cls.__qualname__} has no method {name!r} any more", reason="not_importable"
            )
        return getattr(owner, name)

    def _bound(self, body: list[Any]) -> Any:
        owner, function = self.decode(body[0]), self.decode(body[1])
        if not isinstance(function, types.FunctionType):
            raise NotRebuildable("a method bound by hand to no function", reason="opaque_attribute")
        return types.MethodType(function, owner)

    def _enum(self, body: list[Any]) -> Any:
        return self._enum_class(body[0])[body[1]]

    def _flag(self, body: list[Any]) -> Any:
        return self._enum_class(body[0])(self.decode(body[1]))

    def _enum_class(self, path: str) -> type[enum.Enum]:
        cls = self.importer.get(path)
        if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
            raise NotRebuildable(f"{path} is no enum", reason="untrusted_class")
        return cls

    def _structseq(self, body: list[Any]) -> Any:
        cls = self.importer.get(body[0])
        if cls.__module__ not in _STRUCT_SEQUENCES:
            raise NotRebuildable(f"{body[0]} is no struct sequence", reason="untrusted_class")
        return cls([self.decode(item) for item in body[1]])

    def _ndarray(self, body: dict[str, Any]) -> Any:
        data = self._data(body["data"])
        return self._keep(
            np.frombuffer(data, dtype=_np_dtype(body["dtype"])).reshape(body["shape"]).copy()
        )

    def _data(self, node: Any) -> bytes:
        made: Tensor | bytes = self.decode(node)
        return made if isinstance(made, bytes) else made.numpy().tobytes()

    def _generator(self, body: dict[str, Any]) -> torch.Generator:
        made = torch.Generator(self.device or body["device"])
        state = self.decode(body["state"])
        if torch.device(body["device"]).type == made.device.type:
            made.set_state(state)
        return made

    def _np_random(self, body: dict[str, Any]) -> Any:
        state = self.decode(body["state"])
        if body["legacy"]:
            made = np.random.RandomState()
            made.set_state(state)
            return made
        bits = _BIT_GENERATORS[state["bit_generator"]]()
        bits.state = state
        return np.random.Generator(bits)

    def _py_random(self, body: Any) -> random.Random:
        made = self._keep(random.Random())
        made.setstate(self.decode(body))
        return made  # type: ignore[no-any-return]

    def _weakref(self, body: Any) -> Any:
        target = self.decode(body)
        return _dead_reference() if target is None else weakref.ref(target)


def _dead_reference() -> Any:
    class Gone:
        pass

    return weakref.ref(Gone())


def _np_dtype(text: str) -> Any:
    dtype = np.dtype(text)
    if dtype.hasobject:
        raise Corrupted("a numpy array of Python objects is not allowed")
    return dtype


def _torch_name(decoder: Decoder, name: str) -> Any:  # noqa: ARG001
    if name not in _TORCH_NAMES:
        raise Corrupted(f"torch.{name} is no layout, memory format or quantisation scheme")
    return getattr(torch, name)


def _partial(decoder: Decoder, body: list[Any]) -> Any:
    function, args, keywords = (decoder.decode(part) for part in body)
    return functools.partial(function, *args, **keywords)


def _tuple(decoder: Decoder, body: list[Any]) -> Any:
    return tuple([decoder.decode(item) for item in body])


def _device(decoder: Decoder, name: str) -> torch.device:
    return torch.device(decoder.device if decoder.device and name != "meta" else name)


def _module_value(decoder: Decoder, body: Any) -> Any:
    if decoder._module is None:
        raise NotRebuildable("a module in this place cannot be rebuilt", reason="opaque_argument")
    return decoder._module(body)


_RULES: dict[str, Callable[[Decoder, Any], Any]] = {
    "$ref": lambda d, b: d._numbered[b],
    "$tuple": _tuple,
    "$dict": lambda d, b: d._pairs(d._keep({}), b),
    "$odict": lambda d, b: d._pairs(d._keep(collections.OrderedDict()), b),
    "$ddict": lambda d, b: d._pairs(d._keep(collections.defaultdict(d.decode(b[0]))), b[1]),
    "$deque": lambda d, b: (
        (q := d._keep(collections.deque(maxlen=b[1]))).extend(map(d.decode, b[0])) or q
    ),
    "$mapping": lambda d, b: types.MappingProxyType(d._pairs({}, b)),
    "$structseq": Decoder._structseq,
    "$set": lambda d, b: {d.decode(item) for item in b},
    "$frozenset": lambda d, b: frozenset([d.decode(item) for item in b]),
    "$float": lambda _d, b: float(b),
    "$int": lambda _d, b: int(b),
    "$complex": lambda d, b: complex(d.decode(b[0]), d.decode(b[1])),
    "$str": lambda _d, b: base64.b64decode(b).decode("utf-8", "surrogatepass"),
    "$bytes": lambda _d, b: base64.b64decode(b),
    "$bytearray": lambda _d, b: bytearray(base64.b64decode(b)),
    "$const": lambda _d, b: _CONSTANTS[b],
    "$slice": lambda d, b: slice(*map(d.decode, b)),
    "$range": lambda _d, b: range(*b),
    "$size": lambda _d, b: torch.Size(b),
    "$dtype": lambda _d, b: dtype_of(b),
    "$device": _device,
    "$torch": _torch_name,
    "$module": _module_value,
    "$generator": Decoder._generator,
    "$class": lambda d, b: d.importer.get(b),
    "$function": Decoder._function,
    "$local": Decoder._local,
    "$method": Decoder._method,
    "$bound": Decoder._bound,
    "$partial": _partial,
    "$enum": Decoder._enum,
    "$flag": Decoder._flag,
    "$weakref": Decoder._weakref,
    "$ndarray": Decoder._ndarray,
    "$npscalar": lambda _d, b: np.frombuffer(base64.b64decode(b[1]), _np_dtype(b[0]))[0],
    "$npdtype": lambda _d, b: _np_dtype(b),
    "$nprandom": Decoder._np_random,
    "$pyrandom": Decoder._py_random,
    "$path": lambda _d, b: pathlib.Path(b),
    "$logger": lambda _d, b: logging.getLogger(b),
    "$lock": lambda _d, b: {"Lock": threading.Lock, "RLock": threading.RLock}[b](),
    "$pymodule": lambda d, b: d.importer.module(b),
    "$dropped": lambda _d, _b: None,
    "$object": Decoder._object,
    "$opaque": Decoder._opaque,
}
