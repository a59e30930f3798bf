"""Methods of a class that tell of their calls while somebody listens. Knows no trace.

The class is patched, not the object: copies, pickles and the attributes of a module show nothing.
Each method is replaced once, whatever the number of listeners, and put back when the last one
leaves, in whatever order they do.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

from modulelens.capture.hook import Undo


class Listener(Protocol):
    """Is told of each call; may add and remove listeners meanwhile."""

    def called(self, module: Any, method: str, args: Any, kwargs: Any) -> None:
        """Before the call. `kwargs` is one dict from here to the end of the call."""

    def returned(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """After the call."""

    def raised(self, module: Any, error: BaseException) -> None:
        """After a call that ended by an exception; also when `called` did not get to its end."""


_listeners: dict[tuple[type, str], list[Listener]] = {}


def listen(undo: Undo, cls: type, method: str, listener: Listener) -> None:
    """Tells the listener of calls of the method on objects of exactly that class."""
    heard = _listeners.setdefault((cls, method), [])
    undo.add(lambda: _leave(cls, method, listener))
    heard.append(listener)
    if len(heard) == 1:
        setattr(cls, method, _telling(cls, method, heard))


def _leave(cls: type, method: str, listener: Listener) -> None:
    heard = _listeners.get((cls, method), [])
    if listener in heard:
        heard.remove(listener)
    if heard:
        return
    _listeners.pop((cls, method), None)
    live: Any = vars(cls).get(method)
    if getattr(live, "_modulelens", False):  # else somebody wrapped ours: it stays, and is silent
        if live._own is None:
            delattr(cls, method)
        else:
            setattr(cls, method, live._own)


def _telling(cls: type, method: str, heard: list[Listener]) -> Any:
    own = vars(cls).get(method)

    @functools.wraps(getattr(cls, method))
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A method that is inherited is looked up at each call: others may patch it meanwhile.
        original = getattr(super(cls, self), method) if own is None else own.__get__(self, cls)
        if torch.compiler.is_compiling() or type(self) is not cls:
            return original(*args, **kwargs)
        try:
            for listener in heard:  # one that listens from now on hears this very call
                listener.called(self, method, args, kwargs)
            output = original(*args, **kwargs)
        except BaseException as error:
            for listener in reversed(tuple(heard)):
                listener.raised(self, error)
            raise
        for listener in reversed(tuple(heard)):
            listener.returned(self, args, kwargs, output)
        return output

    marked: Any = telling
    marked._modulelens, marked._own = True, own
    return marked
