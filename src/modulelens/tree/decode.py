"""The closed JSON grammar -> live Python values. Calls nothing that the record names.

Classes are imported from allowed packages; objects are made without their constructor and given
their attributes. Containers are numbered in the order in which they were written.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import inspect
import logging
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulelens.errors import Corrupted, ModuleLensError, NotRebuildable
from modulelens.records import Structure, TensorRef, as_ref
from modulelens.tree.functions import make_local
from modulelens.tree.kinds import COMPOUNDS, LITERAL_BASES, LITERALS, SOURCES, np_dtype
from modulelens.tree.names import Importer, untrusted
from modulelens.tree.tensors import SPECIAL_KINDS, decode_special

#: Deeper than what the encoder writes, and far from the interpreter's own limit.
_MAX_DEPTH = 150
#: A view of a part of an array is laid out as it was, if the whole is at most so much larger.
_MOST_SPREAD = 64
_STRUCT_SEQUENCES = frozenset({"torch.return_types", "time", "os", "sys"})
_IMMUTABLE = (tuple, frozenset, str, bytes, int, float)
_DICTS = (collections.OrderedDict, collections.defaultdict, dict)
_MUTABLE = (*_DICTS, list, set, types.SimpleNamespace, object)
_UNFINISHED = object()


class Opaque:
    """Stands for a value that could not be kept. Printing it says why; using it fails clearly."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        self.why = why

    def __repr__(self) -> str:
        return f"<not kept: {self.kind}: {self.why}>"


@dataclasses.dataclass(eq=False)
class Decoder:
    """Decodes structures of one session.

    Args:
        tensor: A `TensorRef` -> a tensor.
        importer: Imports classes and functions that the record names.
        module: The body of a `$module` -> a module; None refuses modules.
        device: Where `$device` and `$generator` values point to; None keeps them.
        strict: Raise at `$opaque` values instead of leaving an `Opaque` in their place.
    """

    tensor: Callable[[TensorRef], Tensor]
    importer: Importer
    module: Callable[[Any], torch.nn.Module] | None = None
    device: str | None = None
    strict: str = ""
    _numbered: list[Any] = dataclasses.field(default_factory=list, init=False)
    _depth: int = dataclasses.field(default=0, init=False)

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

    def named(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of attributes or keyword arguments, by name.

        A device that is given as text moves as `$device` does, where its name says what it is.
        """
        return {
            name: self._moved(item) if type(item) is str and "device" in name else self.decode(item)
            for name, item in values.items()
        }

    def _moved(self, text: str) -> str:
        try:
            return str(self._place(str(torch.device(text))))
        except RuntimeError:  # some other word, such as "auto"
            return text

    def tensors(self, nodes: Mapping[str, Structure]) -> dict[str, Tensor | None]:
        """Tensors by name, None where there is none.

        Raises:
            Corrupted: A value is something else; and as `decode` does.
        """
        made = {name: self.decode(node) for name, node in nodes.items()}
        for name, value in made.items():
            if isinstance(value, Opaque):
                text = f"{name} is a {value.kind}: {value.why}"
                raise NotRebuildable(text, reason="tensor_subclass")
            if not (value is None or isinstance(value, Tensor)):
                raise Corrupted(f"{name} is a {type(value).__name__}, not a tensor")
        return made

    def _container(self, node: list[Any] | dict[str, Any]) -> Any:
        if isinstance(node, list):
            made: list[Any] = self._keep([])
            made.extend(self.decode(item) for item in node)
            return made
        key = next(iter(node), None)
        if key is None or not key.startswith("$"):
            plain: dict[str, Any] = self._keep({})
            plain.update(self.named(node))
            return plain
        try:
            return self._special(key, node)
        except ModuleLensError:
            raise
        except Exception as error:  # boundary: what a record says goes to foreign constructors
            text = f"{type(error).__name__}: {error}"
            raise Corrupted(f"a {key} value cannot be read: {text}") from error

    def _special(self, key: str, node: dict[str, Any]) -> Any:
        if key in ("$tensor", "$parameter"):
            return self._any_tensor(node)
        if key in SPECIAL_KINDS:
            return decode_special(key, node[key], self.decode, self.importer)
        rule = _RULES.get(key)
        if rule is None:
            hint = "pip install --upgrade modulelens"
            raise Corrupted(f"unknown kind of value {key!r}", hint=hint)
        return rule(self, node[key])

    def _keep(self, value: Any) -> Any:
        self._numbered.append(value)
        return value

    def _keep_place(self, make: Callable[[], Any]) -> Any:
        """Numbers what can only be made after its parts, before them."""
        place = len(self._numbered)
        self._numbered.append(_UNFINISHED)
        made = self._numbered[place] = make()
        return made

    def _ref(self, number: int) -> Any:
        if self._numbered[number] is _UNFINISHED:
            text = "a value that cannot be changed holds itself"
            raise NotRebuildable(text, reason="opaque_attribute")
        return self._numbered[number]

    def _all(self, items: Any) -> list[Any]:
        return [self.decode(item) for item in items]

    def _pairs(self, target: Any, pairs: list[Any]) -> Any:
        for key, item in pairs:
            name = self.decode(key)
            target[name] = self.decode(item)
        return target

    def _deque(self, body: list[Any]) -> Any:
        made = self._keep(collections.deque(maxlen=body[1]))
        made.extend(map(self.decode, body[0]))
        return made

    def _any_tensor(self, node: dict[str, Any]) -> Tensor:
        key, body = next(iter(node.items()))
        made = self.tensor(as_ref(body))
        if key == "$parameter" and not isinstance(made, torch.nn.Parameter):
            # In place: other references to this object stay the same parameter (tied weights).
            made.__class__ = torch.nn.Parameter
        if "vars" in node:
            vars(made).update(self.decode(node["vars"]))
        return made

    def _object(self, body: dict[str, Any]) -> Any:
        cls = self.importer.get_class(body["cls"], object)
        if issubclass(cls, torch.nn.Module):
            raise untrusted(f"{body['cls']} is no class for plain data")
        base: Any = next(b for b in (*_IMMUTABLE, *_MUTABLE) if issubclass(cls, b))
        if base in _IMMUTABLE:
            made = self._keep_place(lambda: base.__new__(cls, self._content(body)))
        else:
            made = self._keep(base.__new__(cls))
            for item in body.get("items", ()):
                if base in _DICTS:
                    base.__setitem__(made, *self._all(item))
                else:
                    (list.append if base is list else set.add)(made, self.decode(item))
        if "vars" in body:
            values = object.__getattribute__(made, "__dict__")
            values.update(self.named(body["vars"]))
        for name, item in self.named(body.get("slots", {})).items():
            object.__setattr__(made, name, item)
        return made

    def _content(self, body: dict[str, Any]) -> Any:
        return self.decode(body["value"]) if "value" in body else self._all(body["items"])

    def _opaque(self, body: dict[str, Any]) -> Opaque:
        if self.strict:
            text = f"{self.strict} holds {body['type']}: {body['why']}"
            raise NotRebuildable(text, reason="opaque_argument")
        return Opaque(body["type"], body["why"])

    def _local(self, body: dict[str, Any]) -> Any:
        made, cells = make_local(body, self.importer)
        self._keep(made)
        contents, made.__defaults__, made.__kwdefaults__ = self._all(body["inside"])
        for cell, item in zip(cells, contents, strict=True):
            cell.cell_contents = item
        return made

    def _method(self, body: list[Any]) -> Any:
        owner, name = self.decode(body[0]), body[1]
        cls = owner if isinstance(owner, type) else type(owner)
        if issubclass(cls, (pathlib.PurePath, np.ndarray, logging.Logger, types.ModuleType)):
            raise untrusted(f"a method of a {cls.__qualname__}, which may reach files")
        if isinstance(inspect.getattr_static(cls, name, None), (property, types.NoneType)):
            text = f"{cls.__qualname__} has no method {name!r} any more"
            raise NotRebuildable(text, reason="not_importable")
        return getattr(owner, name)

    def _bound(self, body: list[Any]) -> Any:
        owner, function = self._all(body)
        if not isinstance(function, types.FunctionType):
            raise NotRebuildable("a method bound by hand to no function", reason="opaque_attribute")
        return types.MethodType(function, owner)

    def _enum(self, body: list[Any]) -> Any:
        cls = self.importer.get_class(body[0], enum.Enum)
        name = self.decode(body[1])
        return cls[name] if isinstance(name, str) else cls(name)

    def _structseq(self, body: list[Any]) -> Any:
        cls = self.importer.get(body[0])
        if cls.__module__ not in _STRUCT_SEQUENCES:
            raise untrusted(f"{body[0]} is no struct sequence")
        return cls(self._all(body[1]))

    def _array(self, body: list[Any]) -> Any:
        data = self.decode(body[2])
        raw = data.numpy() if isinstance(data, Tensor) else data
        made = np.frombuffer(raw, dtype=np_dtype(body[0])).reshape(body[1]).copy()
        return _laid_out(made, *body[3:]) if len(body) > 3 else made

    def _generator(self, body: list[Any]) -> torch.Generator:
        device, state = body[0], self.decode(body[1])
        made = torch.Generator(self.device or device)
        if torch.device(device).type == made.device.type:
            made.set_state(state)
        return made

    def _nn_module(self, body: Any) -> torch.nn.Module:
        if self.module is None:
            text = "a module in this place cannot be rebuilt"
            raise NotRebuildable(text, reason="opaque_argument")
        return self.module(body)

    def _place(self, name: str) -> torch.device:
        return torch.device(self.device if self.device and name != "meta" else name)


def _laid_out(array: Any, strides: list[int], writeable: bool) -> Any:
    """The same values in memory with those strides, where that is not much larger."""
    pairs = list(zip(array.shape, strides, strict=True))
    before = sum((n - 1) * -step for n, step in pairs if step < 0)
    size = before + sum((n - 1) * step for n, step in pairs if step > 0) + array.itemsize
    if array.size and size <= _MOST_SPREAD * array.nbytes:
        memory = np.zeros(size, np.uint8)
        laid: Any = np.ndarray(array.shape, array.dtype, memory, before, strides)
        laid[...] = array
        array = laid
    array.flags.writeable = bool(writeable)
    return array


Rule = Callable[[Decoder, Any], Any]


def _literal(make: Callable[[Any], Any]) -> Rule:
    return lambda _d, b: make(b)


def _compound(make: Callable[..., Any]) -> Rule:
    return lambda d, b: make(*d._all(b))


def _source(make: Callable[..., Any]) -> Rule:
    return lambda d, b: d._keep_place(lambda: make(*d._all(b)))


_RULES: dict[str, Rule] = {
    "$ref": Decoder._ref,
    "$tuple": lambda d, b: tuple(d._all(b)),
    "$set": lambda d, b: set(d._all(b)),
    "$frozenset": lambda d, b: frozenset(d._all(b)),
    "$dict": lambda d, b: d._pairs(d._keep({}), b),
    "$odict": lambda d, b: d._pairs(d._keep(collections.OrderedDict()), b),
    "$deque": Decoder._deque,
    "$float": lambda _d, b: float(b),
    "$int": lambda _d, b: int(b, 16),
    "$str": lambda _d, b: base64.b64decode(b).decode("utf-8", "surrogatepass"),
    "$class": lambda d, b: d.importer.get(b),
    "$function": lambda d, b: d.importer.get(b),
    "$pymodule": lambda d, b: d.importer.module(b),
    "$local": Decoder._local,
    "$method": Decoder._method,
    "$bound": Decoder._bound,
    "$enum": Decoder._enum,
    "$structseq": Decoder._structseq,
    "$ndarray": lambda d, b: d._keep(d._array(b)),
    "$npscalar": lambda d, b: d._array(b)[()],
    "$device": Decoder._place,
    "$generator": lambda d, b: d._keep_place(lambda: d._generator(b)),
    "$packed": lambda d, b: d._keep_place(lambda: torch.ops.quantized.linear_prepack(*d._all(b))),
    "$module": Decoder._nn_module,
    "$object": Decoder._object,
    "$opaque": Decoder._opaque,
    **{key: _literal(make) for key, _, make in (LITERALS | LITERAL_BASES).values()},
    **{key: _compound(make) for key, _, make in COMPOUNDS.values()},
    **{key: _source(make) for key, _, make in SOURCES.values()},
}
