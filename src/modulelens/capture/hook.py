"""What a tracer installs, and how it is taken back. Copies and pickles of a module hold none of it.

Users save and copy their model inside the step. What they get must open where ModuleLens is not
installed, and must not drag the trace along; so a copied hook is one of Python's own that does
nothing, under a key that no later hook can have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

_C: Any = torch._C


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
    undo: Undo, hooks: dict[int, Any], call: Callable[..., object], *marks: dict[int, bool]
) -> OwnId:
    """Adds a hook behind those in `hooks`, of a module or of all, marked in `marks`.

    Returns:
        Its id.
    """
    number = OwnId(RemovableHandle(hooks).id)

    def remove() -> None:
        for place in (hooks, *marks):
            place.pop(number, None)

    undo.add(remove)
    hooks[number] = call
    for mark in marks:
        mark[number] = True
    return number


def hook_gradient(undo: Undo, leaf: torch.Tensor, hook: Callable[..., object]) -> None:
    """Hands the hook what arrives at a leaf."""

    def remove() -> None:
        hooks: dict[int, Any] = leaf._backward_hooks or {}
        for number in [n for n, found in hooks.items() if found is hook]:
            del hooks[number]

    undo.add(remove)
    leaf.register_hook(hook)


def wrap_function(undo: Undo, name: str, around: Callable[..., Any]) -> None:
    """Puts `around(original, *args, **kwargs)` in the place of one of torch's functions."""
    original = vars(torch)[name]

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    over: Any = wrapped

    def take_back() -> None:
        # Those wrapped around it end in any order: the last one takes back all that are over.
        over._over = True
        live = vars(torch)[name]
        while getattr(live, "_over", False):
            live = live.__wrapped__
        setattr(torch, name, live)

    undo.add(take_back)
    setattr(torch, name, wrapped)


def unseen(action: Callable[..., Any], *args: Any) -> Any:
    """Runs it past the user's dispatch and function modes: they are to see the step's own ops."""
    if not (_C._len_torch_function_stack() or _C._len_torch_dispatch_stack()):
        return action(*args)
    with _C.DisableTorchFunction(), _disable_current_modes():
        return action(*args)


_STORAGE: Any = torch.UntypedStorage
_RESIZES = ((_STORAGE, "resize_"), (torch.Tensor, "resize_"), (torch.Tensor, "resize_as_"))
_guards: list[Undo] = []


def guard_resizes(undo: Undo) -> None:
    """Lets memory that shares its pages own them before it is resized.

    torch breaks such memory else (FSDP frees a layer's weights that way), as long as it is shared.
    """

    def leave() -> None:
        if undo in _guards:
            _guards.remove(undo)
        for cls, name in () if _guards else _RESIZES:
            if getattr(vars(cls).get(name), "_modulelens", False):
                delattr(cls, name)  # its base has torch's own

    undo.add(leave)
    _guards.append(undo)
    for cls, name in _RESIZES:
        if name not in vars(cls):
            setattr(cls, name, _owning(getattr(cls, name)))


def _own(memory: Any) -> None:
    with contextlib.suppress(RuntimeError):  # sparse, wrapped, fake: it has none to share
        if not isinstance(memory, torch.Tensor) or _C._is_cow_tensor(memory):
            memory.data_ptr()  # asked for where it is, it is made its own


def _owning(original: Any) -> Any:
    @functools.wraps(original)
    def resize(memory: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            unseen(_own, memory)
        return original(memory, *args, **kwargs)

    marked: Any = resize
    marked._modulelens = True
    return marked


_eager: list[Undo] = []
_stances: list[Any] = []


def run_eagerly(undo: Undo) -> None:
    """Lets no compiled code run until all who asked for that have taken it back."""

    def leave() -> None:
        if undo in _eager:
            _eager.remove(undo)
        if not _eager and _stances:
            _stances[0].__exit__(None, None, None)
            _stances.clear()

    undo.add(leave)
    _eager.append(undo)
    if not _stances:
        _stances.append(torch.compiler.set_stance("force_eager"))


class Undo:
    """What takes back all that was installed. Actions are added first, and may run twice."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], Any]] = []

    def add(self, action: Callable[[], Any]) -> None:
        """Adds what takes back the thing that is installed next."""
        self._actions.append(action)

    def run(self) -> None:
        """Runs all, the last one first. Safe to call twice."""
        finish(self._run)

    def _run(self) -> None:
        while self._actions:
            self._actions[-1]()
            self._actions.pop()


def finish(action: Callable[[], object]) -> None:
    """Runs it to its end: Ctrl-C meanwhile starts it again, and is raised when it is done."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            action()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
