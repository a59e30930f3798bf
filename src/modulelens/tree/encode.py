"""Live Python values -> the closed JSON grammar. Knows kinds of values, not where tensors go.

Plain JSON stands for itself; everything else is an object with one key that starts with `$`
(`docs/format.md` lists them). Mutable containers and objects are numbered in the order in which
they are met; a second meeting gives `{"$ref": number}`. Tensors are handed to a callable.
"""

from __future__ import annotations

import collections
import enum
import inspect
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulelens.errors import NotRebuildable
from modulelens.tree.decode import Opaque
from modulelens.tree.functions import enclosed, local_path
from modulelens.tree.kinds import COMPOUNDS, LITERAL_BASES, LITERALS, SOURCES, to_base64
from modulelens.tree.names import display_path, path_of
from modulelens.tree.objects import attributes_of, data_base, no_object_rule, slots_of
from modulelens.tree.shards import arrived, is_awaitable
from modulelens.tree.tensors import encode_special, is_parameter, is_plain

_MAX_DEPTH = 120
#: Most nodes of one session, a guard against objects that drag in the whole process.
_MAX_NODES = 200_000
_JSON_INT = 1 << 62
_INLINE_BYTES = 1024
#: Where what `torch.compile` makes of a function or method keeps that.
_COMPILED_FROM = "_torchdynamo_orig_callable"


#: The numbered values inside an object, itself first, and its JSON.
Known = tuple[tuple[Any, ...], Any]


class Encoder:
    """Encodes values of one session: numbers for shared containers run through it.

    Args:
        tensor: A plain strided tensor -> its JSON.
        module: An `nn.Module` met inside a value -> its JSON; None refuses modules.
        known: Objects that another session encoded, and that nothing changed since: a config
            that hangs on every layer is encoded once. Filled here.
    """

    def __init__(
        self,
        tensor: Callable[[Tensor], Any],
        module: Callable[[torch.nn.Module], Any] | None = None,
        known: dict[int, Known] | None = None,
    ) -> None:
        self._tensor = tensor
        self._module = module
        self._known = known
        self._left = _MAX_NODES
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._repeats = 0
        #: Whether numpy arrays are written with their layout in memory, which is no part of values.
        self.layouts = True
        self.opaque: list[str] = []
        self.special: list[Tensor] = []
        self.pending: list[tuple[Any, dict[str, Any]]] = []

    @property
    def count(self) -> int:
        """Number of mutable containers and objects met so far."""
        return len(self._numbers)

    def encode(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON. What has no rule becomes `$opaque` with the reason; never raises."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            return self._refuse(value, "too deep or too large to be an argument")
        rule = _EXACT.get(kind) or next(
            (rule for base, rule in _BY_BASE if isinstance(value, base)), Encoder._object
        )
        return rule(self, value, depth)

    def arrive(self, place: dict[str, Any], value: Any) -> None:
        """Puts a value that came later into its place, one of `pending`."""
        encoded = self.encode(value)
        # What is met twice has a number by the order of meeting, which no longer holds.
        if isinstance(encoded, dict) and not self._repeats:
            self.opaque.remove("{type}: {why}".format(**place["$opaque"]))
            place.clear()
            place.update(encoded)

    def _awaited(self, value: Any, depth: int) -> Any:
        inside = object.__getattribute__(value, "__dict__")  # other ways would wait
        if inside["_result"] is not None:
            return self.encode(inside["_result"], depth + 1)
        place = self._refuse(value, "the step did not wait for it")
        self.pending.append((value, place))
        return place

    def _refuse(self, value: Any, why: str) -> dict[str, Any]:
        return self._opaque(display_path(type(value)), why)

    def _opaque(self, kind: str, why: str) -> dict[str, Any]:
        self.opaque.append(f"{kind}: {why}")
        return {"$opaque": {"type": kind, "why": why}}

    def _number(self, value: Any) -> dict[str, int] | None:
        number = self._numbers.get(id(value))
        if number is not None:
            self._repeats += 1
            return {"$ref": number}
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return None

    # ---- containers

    def _all(self, items: Iterable[Any], depth: int) -> list[Any]:
        return [self.encode(item, depth + 1) for item in items]

    def _unordered(self, items: Iterable[Any], depth: int) -> list[Any]:
        """In an order that is the same in every process, unless the items have numbers."""
        count = len(self._numbers)
        encoded = self._all(items, depth)
        return sorted(encoded, key=repr) if len(self._numbers) == count else encoded

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[list[Any]]:
        return [self._all(pair, depth) for pair in value.items()]

    def _named(self, values: dict[str, Any], depth: int) -> dict[str, Any]:
        return {name: self.encode(item, depth + 1) for name, item in values.items()}

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        seen = self._number(value)
        if seen is not None:
            return seen
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
            return self._named(value, depth)
        return {"$dict": self._pairs(value, depth)}

    # ---- torch and numpy

    def _any_tensor(self, value: Tensor, depth: int) -> Any:
        if not is_plain(value):
            self.special.append(value)
            plain = arrived(value)
            if plain is not None:
                return self._any_tensor(plain, depth)
            try:
                return encode_special(value, lambda part: self.encode(part, depth + 1))
            except NotRebuildable as error:
                return self._refuse(value, error.message)
            except Exception as error:  # noqa: BLE001 - boundary: a subclass of somebody else's
                return self._refuse(value, f"{type(error).__name__}: {error}")
        try:
            ref = self._tensor(value)
        except NotRebuildable as error:
            return self._refuse(value, error.message)
        if not is_parameter(value):
            return {"$tensor": ref}
        found = {"$parameter": ref}
        extra = value.__dict__
        if extra:
            found["vars"] = self.encode({k: v for k, v in extra.items() if _hangs(k, v)}, depth + 1)
        return found

    def _packed(self, value: torch.ScriptObject, depth: int) -> Any:
        try:
            parts = torch.ops.quantized.linear_unpack(value)
        except RuntimeError:  # packed for something else
            return self._refuse(value, "an object of a C++ extension")
        return self._number(value) or {"$packed": self._all(parts, depth)}

    def _nn_module(self, value: torch.nn.Module, depth: int) -> Any:  # noqa: ARG002
        if self._module is None:
            return self._refuse(value, "a module in this place cannot be kept")
        return {"$module": self._module(value)}

    def _numpy(self, value: Any, depth: int) -> Any:
        if value.dtype.hasobject or value.dtype.names:
            return self._refuse(value, f"a numpy array of dtype {value.dtype}")
        data: Any = value.tobytes()
        if len(data) > _INLINE_BYTES:
            # A large one is kept as a tensor is; a small one in place, so that equal states stay
            # equal.
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        body = [value.dtype.str, list(value.shape), self.encode(data, depth + 1)]
        if isinstance(value, np.generic):
            return {"$npscalar": body}
        if self.layouts and not (value.flags.c_contiguous and value.flags.writeable):
            body += [list(value.strides), value.flags.writeable]
        return self._number(value) or {"$ndarray": body}

    # ---- names

    def _by_name(self, value: Any, depth: int) -> Any:
        path = path_of(value)
        if path is not None:
            return {"$class" if isinstance(value, type) else "$function": path}
        if isinstance(value, types.FunctionType) and _COMPILED_FROM in vars(value):
            return self.encode(vars(value)[_COMPILED_FROM], depth + 1)  # it ran eagerly
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType) and not _is_own_method(value):
            return {"$bound": self._all((owner, value.__func__), depth)}
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)) and not isinstance(
            owner, types.ModuleType
        ):
            return {"$method": [self.encode(owner, depth + 1), value.__name__]}
        local = local_path(value) if isinstance(value, types.FunctionType) else None
        if local is not None:
            return self._number(value) or {
                "$local": local | {"inside": self._all(enclosed(value), depth)}
            }
        code = getattr(value, "__code__", None)
        where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
        name = getattr(value, "__qualname__", type(value).__name__)
        what = "a lambda" if "<lambda>" in name else f"{name!r}, which has no importable name,"
        return self._refuse(value, f"{what}{where}")

    def _enum(self, value: enum.Enum, depth: int) -> Any:
        path = path_of(type(value))
        if path is None:
            return self._refuse(value, "its enum class has no importable name")
        # A combination of flags has no name that can be looked up.
        name = value.value if isinstance(value, enum.Flag) else value.name
        return {"$enum": [path, self.encode(name, depth + 1)]}

    # ---- everything else: class path + vars + slots + items

    def _object(self, value: Any, depth: int) -> Any:
        cls = type(value)
        if is_awaitable(cls):
            return self._awaited(value, depth)
        path = path_of(cls)
        if path and issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):
            return {"$structseq": [path, self._all(value, depth)]}
        why = no_object_rule(cls, path)
        if why:
            return self._refuse(value, why)
        if id(value) in self._numbers or self._known is None:
            return self._number(value) or self._taken_apart(value, path, depth)
        inside, encoded = self._known.get(id(value), ((), None))
        if encoded is not None and self._numbers.keys().isdisjoint(map(id, inside)):
            for item in inside:
                self._number(item)
            return encoded
        first, refused, repeats = len(self._alive), len(self.opaque), self._repeats
        self._number(value)
        encoded = self._taken_apart(value, path, depth)
        if self._repeats == repeats and len(self.opaque) == refused:
            self._known[id(value)] = tuple(self._alive[first:]), encoded
        return encoded

    def _taken_apart(self, value: Any, path: str | None, depth: int) -> dict[str, Any]:
        body: dict[str, Any] = {"cls": path}
        cls = type(value)
        base = data_base(cls)
        if base is dict:
            body["items"] = [self._all(pair, depth) for pair in dict.items(value)]
        elif base in (list, tuple):
            body["items"] = self._all(base.__iter__(value), depth)
        elif base in (set, frozenset):
            body["items"] = self._unordered(base.__iter__(value), depth)
        elif base is not None:
            body["value"] = self.encode(base(value), depth + 1)
        attributes = {_text_key(k): v for k, v in attributes_of(value).items()}
        for kind, values in (("vars", attributes), ("slots", slots_of(value))):
            if values:
                body[kind] = self._named(values, depth)
        return {"$object": body}


def _hangs(name: str, value: Any) -> bool:
    """Whether what hangs on a parameter is kept.

    Gradients that a trainer keeps there are no part of a forward, and as large as the weights.
    """
    if type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return "grad" not in name
    encoder = Encoder(lambda _: 0, lambda _: 0)
    encoder.encode(value)
    return not encoder.opaque


def _is_text(value: str) -> bool:
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:  # lone surrogates are no JSON
        return False
    return True


def _is_own_method(method: types.MethodType) -> bool:
    """Whether its owner's class has it under its name; else it was bound by hand."""
    owner = method.__self__
    cls = owner if isinstance(owner, type) else type(owner)
    found = inspect.getattr_static(cls, method.__name__, None)
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    if getattr(found, "_modulelens", False):  # a trace listens to it
        found = found.__wrapped__
    return found is method.__func__


def _text(value: str) -> Any:
    if _is_text(value):
        return value
    return {"$str": to_base64(value.encode("utf-8", "surrogatepass"))}


def _text_key(key: str) -> str:
    return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()


Rule = Callable[[Encoder, Any, int], Any]


def _literal(key: str, apart: Callable[[Any], Any]) -> Rule:
    return lambda _e, v, _d: {key: apart(v)}


def _compound(key: str, apart: Callable[[Any], Any]) -> Rule:
    return lambda e, v, d: {key: e._all(apart(v), d)}


def _source(key: str, apart: Callable[[Any], Any]) -> Rule:
    return lambda e, v, d: e._number(v) or {key: e._all(apart(v), d)}


_EXACT: dict[type, Rule] = {
    int: lambda _e, v, _d: v if -_JSON_INT < v < _JSON_INT else {"$int": hex(v)},
    float: lambda _e, v, _d: v if math.isfinite(v) else {"$float": repr(v)},
    str: lambda _e, v, _d: v if v.isascii() else _text(v),
    list: lambda e, v, d: e._number(v) or e._all(v, d),
    tuple: lambda e, v, d: {"$tuple": e._all(v, d)},
    dict: Encoder._dict,
    set: lambda e, v, d: {"$set": e._unordered(v, d)},
    frozenset: lambda e, v, d: {"$frozenset": e._unordered(v, d)},
    collections.OrderedDict: lambda e, v, d: e._number(v) or {"$odict": e._pairs(v, d)},
    collections.deque: lambda e, v, d: e._number(v) or {"$deque": [e._all(v, d), v.maxlen]},
    torch.ScriptObject: Encoder._packed,
    Tensor: Encoder._any_tensor,
    torch.nn.Parameter: Encoder._any_tensor,
    np.ndarray: Encoder._numpy,
    torch.device: lambda _e, v, _d: {"$device": str(v)},
    torch.Generator: _source("$generator", lambda v: (str(v.device), v.get_state())),
    Opaque: lambda e, v, _d: e._opaque(v.kind, v.why),
    **{kind: _literal(key, apart) for kind, (key, apart, _) in LITERALS.items()},
    **{kind: _compound(key, apart) for kind, (key, apart, _) in COMPOUNDS.items()},
    **{kind: _source(key, apart) for kind, (key, apart, _) in SOURCES.items()},
}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc)
_DESCRIPTORS = (types.WrapperDescriptorType, types.MethodDescriptorType)
_BY_BASE: list[tuple[Any, Rule]] = [
    (Tensor, Encoder._any_tensor),
    (torch.nn.Module, Encoder._nn_module),
    (enum.Enum, Encoder._enum),
    ((type, *_FUNCTIONS, *_DESCRIPTORS), Encoder._by_name),
    (np.generic, Encoder._numpy),
    (types.ModuleType, lambda _e, v, _d: {"$pymodule": v.__name__}),
    *((kind, _literal(key, apart)) for kind, (key, apart, _) in LITERAL_BASES.items()),
]
