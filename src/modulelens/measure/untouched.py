"""What verdicts are formed with, as it was before the code that is judged ran.

Knows namespaces and torch's modes; neither what is compared nor who changed something.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import sys
from types import ModuleType
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

_GONE = object()


class _Untouched(contextlib.ContextDecorator):
    """In its scope, names of Python, torch and ModuleLens mean what they did at `keep`.

    What somebody put in their place is back at the end. No foreign code may run inside.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._scope = contextlib.ExitStack()
        self._kept: list[tuple[Any, Any, dict[str, Any]]] = []

    def keep(self) -> None:
        """Remembers what they mean now."""
        own = [module for name, module in sys.modules.items() if name.startswith("modulelens")]
        found = {id(c): c for m in own for c in vars(m).values() if isinstance(c, type)}
        classes = [c for c in found.values() if c.__module__.startswith("modulelens")]
        places: list[Any] = [builtins, math, operator, torch, torch.Tensor, *own, *classes]
        self._kept = [(place, place.__dict__, dict(place.__dict__)) for place in places]

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for place, live, kept in self._kept:
            if live != kept:
                self._put_back(place, live, kept)
        for _ in range(torch._C._len_torch_function_stack()):
            self._scope.enter_context(_pop_mode_temporarily())
        self._scope.enter_context(_disable_current_modes())

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._scope.close()

    def _put_back(self, place: Any, live: Any, kept: dict[str, Any]) -> None:
        if place is builtins:  # without the help of a function
            changed = live.copy()
            live.update(kept)
            self._scope.callback(live.update, changed)
            return
        for name in {*live, *kept}:
            now, then = live.get(name, _GONE), kept.get(name, _GONE)
            if then is _GONE and isinstance(now, ModuleType):
                kept[name] = now  # imported by now
            elif now is not then:
                _set(place, name, then)
                self._scope.callback(_set, place, name, now)


def _set(place: Any, name: str, value: Any) -> None:
    if value is _GONE:
        delattr(place, name)
    else:
        setattr(place, name, value)


untouched = _Untouched()
