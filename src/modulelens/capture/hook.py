"""A tracer's hook on a live module. Copies and pickles made of the module hold nothing of it.

Users save and copy their model inside the step. What they get must open where ModuleLens is not
installed, and must not drag the trace along; so a copied hook is one of Python's own that does
nothing, under a key that no later hook can have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class OwnHook:
    """Calls a function and returns None, so that it changes nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Passes everything on; compiled code, which may come to hold the hook, goes on alone."""
        if torch.compiler.is_compiling():
            return
        self._call(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, does nothing


class OwnId(int):
    """The id of a hook; in a copy a text, which is no hook's id."""

    def __reduce__(self) -> Any:
        return str, ("modulelens",)


def put_hook(
    hooks: dict[int, Any], call: Callable[..., object], *marks: dict[int, bool]
) -> tuple[OwnId, Callable[[], None]]:
    """Adds a hook behind those in a module's `hooks`, marked in `marks`.

    Returns:
        Its id, and the function that removes it.
    """
    number = OwnId(RemovableHandle(hooks).id)
    hooks[number] = OwnHook(call)
    for mark in marks:
        mark[number] = True

    def remove() -> None:
        for place in (hooks, *marks):
            place.pop(number, None)

    return number, remove
