"""Kinds of values that need no context: each with its key, how it comes apart, how it is made.

Nothing here knows numbers of containers, names of classes, or devices.
"""

from __future__ import annotations

import base64
import functools
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

from modulelens.errors import Corrupted
from modulelens.tree.hints import FORM_TYPES, HINT_TYPES, form_named, hint_apart, hint_made
from modulelens.tree.tensors import dtype_name, dtype_of

#: type -> (key, apart, made of that again)
Kinds = dict[Any, tuple[str, Callable[[Any], Any], Callable[..., Any]]]

_CONSTANTS = {repr(value): value for value in (..., NotImplemented)}
_BIT_GENERATORS = {cls.__name__: cls for cls in np.random.BitGenerator.__subclasses__()}
_LOCKS: dict[str, Callable[[], Any]] = {"lock": threading.Lock, "RLock": threading.RLock}
_TORCH_CONSTANTS = (torch.layout, torch.memory_format, torch.qscheme)


def to_base64(data: bytes | bytearray) -> str:
    """Bytes as JSON text."""
    return base64.b64encode(data).decode()


def np_dtype(text: str) -> Any:
    """The numpy dtype of that text; Corrupted for one of Python objects."""
    dtype = np.dtype(text)
    if dtype.hasobject:
        raise Corrupted("a numpy array of Python objects is not allowed")
    return dtype


def _torch_constant(name: str) -> Any:
    found = vars(torch).get(name)
    if not isinstance(found, _TORCH_CONSTANTS):
        raise Corrupted(f"torch.{name} is no layout, memory format or quantisation scheme")
    return found


def check_twister(position: int) -> None:
    """Refuses a place outside of a Mersenne Twister's words: numpy would read beyond them.

    Raises:
        Corrupted: It is outside.
    """
    if not 0 <= position <= 624:
        raise Corrupted(f"a random stream is at word {position} of 624")


def _bit_generator(state: dict[str, Any]) -> Any:
    if state["bit_generator"] == "MT19937":
        check_twister(state["state"]["pos"])
    source = _BIT_GENERATORS[state["bit_generator"]]()
    source.state = state
    return source


def _np_legacy(state: dict[str, Any]) -> np.random.RandomState:
    source = np.random.RandomState(_bit_generator(state))
    source.set_state(state)
    return source


def _pyrandom(state: Any) -> random.Random:
    source = random.Random()
    source.setstate(state)
    return source


_WAITED_AT: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    threading.Barrier: ("$barrier", lambda v: (v.parties, v._action, v._timeout)),
    threading.Condition: ("$condition", lambda _: ()),
    threading.Semaphore: ("$semaphore", lambda v: (v._value,)),
    threading.BoundedSemaphore: ("$bounded", lambda v: (v._initial_value,)),
    threading.local: ("$threadlocal", lambda _: ()),
}


def _event(is_set: bool) -> threading.Event:
    made = threading.Event()
    if is_set:
        made.set()
    return made


def _reference(target: Any) -> Any:
    return weakref.ref(type("Gone", (), {})() if target is None else target)


#: What one text or a few numbers say: apart into JSON.
LITERALS: Kinds = {
    type(...): ("$const", repr, _CONSTANTS.__getitem__),
    type(NotImplemented): ("$const", repr, _CONSTANTS.__getitem__),
    complex: ("$complex", str, complex),
    bytes: ("$bytes", to_base64, base64.b64decode),
    bytearray: ("$bytearray", to_base64, lambda b: bytearray(base64.b64decode(b))),
    range: ("$range", lambda v: [v.start, v.stop, v.step], lambda b: range(*b)),
    torch.Size: ("$size", lambda v: [int(x) for x in v], torch.Size),
    torch.dtype: ("$dtype", dtype_name, dtype_of),
    **dict.fromkeys(
        _TORCH_CONSTANTS, ("$torch", lambda v: str(v).removeprefix("torch."), _torch_constant)
    ),
    **dict.fromkeys(
        (type(threading.Lock()), type(threading.RLock())),
        ("$lock", lambda v: type(v).__name__, lambda b: _LOCKS[b]()),
    ),
    **dict.fromkeys(FORM_TYPES, ("$typing", lambda v: v._name, form_named)),
    torch.utils.hooks.RemovableHandle: ("$dropped", lambda _: "hook handle", lambda _: None),
}
#: The same, for all classes that extend one.
LITERAL_BASES: Kinds = {
    np.dtype: ("$npdtype", lambda v: v.str, np_dtype),
    pathlib.PurePath: ("$path", str, pathlib.Path),
    logging.Logger: ("$logger", lambda v: v.name, logging.getLogger),
}
#: What is made of other values: apart into those.
COMPOUNDS: Kinds = {
    slice: ("$slice", lambda v: (v.start, v.stop, v.step), slice),
    functools.partial: (
        "$partial",
        lambda v: (v.func, v.args, v.keywords),
        lambda function, args, keywords: functools.partial(function, *args, **keywords),
    ),
    types.MappingProxyType: ("$mapping", lambda v: (dict(v),), types.MappingProxyType),
    weakref.ref: ("$weakref", lambda v: (v(),), _reference),
    **dict.fromkeys(HINT_TYPES, ("$hint", hint_apart, hint_made)),
}
#: The same for what has a state of its own: one that is met twice stays one.
SOURCES: Kinds = {
    np.random.Generator: (
        "$nprandom",
        lambda v: (v.bit_generator.state,),
        lambda state: np.random.Generator(_bit_generator(state)),
    ),
    np.random.RandomState: ("$nplegacy", lambda v: (v.get_state(legacy=False),), _np_legacy),
    # What threads wait at is made anew: nobody waits there.
    **{kind: (key, apart, kind) for kind, (key, apart) in _WAITED_AT.items()},
    threading.Event: ("$event", lambda v: (v.is_set(),), _event),
    random.Random: ("$pyrandom", lambda v: (v.getstate(),), _pyrandom),
}
