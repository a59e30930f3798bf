"""What of a plain object is its state: items, attributes and slots. Encodes nothing."""

from __future__ import annotations

import collections.abc
import contextlib
import types
from typing import Any

import torch

_HEAP_TYPE = 1 << 9
_DATA_BASES = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_DICTS = (collections.OrderedDict, collections.defaultdict)
_STATIC = (object, *_DATA_BASES, *_DICTS, types.SimpleNamespace)

#: Attributes of objects that are restored as None, what they are before first use: a cache of the
#: views of a jagged tensor. Captures that saw it filled and empty shall compare equal.
_EMPTIED_ATTRIBUTES = frozenset({"_jt_dict"})


def no_object_rule(cls: type, path: str | None) -> str:
    """Why objects of the class cannot be made from their attributes; empty where they can."""
    if path is None and issubclass(cls, collections.abc.Iterator):
        return "a one-shot iterator: keeping its items would use it up"
    if path is None:
        return "its class has no importable name (defined inside a function?)"
    if type(cls).__name__ == "pybind11_type" or issubclass(cls, torch.ScriptObject):
        return "an object of a C++ extension"
    static = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return "" if static in _STATIC else f"holds native state of {static.__name__}"


def data_base(cls: type) -> type | None:
    """The builtin data type that the class extends, None for a class of its own."""
    return next((base for base in _DATA_BASES if issubclass(cls, base)), None)


def attributes_of(value: Any) -> dict[str, Any]:
    """Its attributes, without asking its class; those to be emptied are None."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    if type(found) is not dict:
        return {}
    return {name: None if name in _EMPTIED_ATTRIBUTES else item for name, item in found.items()}


def slots_of(value: Any) -> dict[str, Any]:
    """The slots of all its classes that are filled."""
    found = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__":
                with contextlib.suppress(AttributeError):
                    found[name] = member.__get__(value)
    return found
