"""Which modules a trace is asked for, and what they are called. Knows wrappers and patterns."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from modulelens.capture.wrappers import own_class
from modulelens.errors import NotFound, UsageError


def check_steps(warmup: object, steps: object) -> None:
    """Refuses numbers of steps that are none.

    Raises:
        UsageError: One is no whole number, or too small.
    """
    if not (isinstance(warmup, int) and isinstance(steps, int) and warmup >= 0 and steps >= 1):
        raise UsageError(f"warmup={warmup!r}, steps={steps!r}: numbers of at least 0 and 1")


def check_model(model: object) -> None:
    """Refuses what is no module.

    Raises:
        UsageError: `model` is not an `nn.Module` instance.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"model is the class {model.__name__}, not a module",
            hint=f"pass an instance: {model.__name__}(...)",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}, not an nn.Module",
            hint="pass the module whose forward is called once per training step",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "model is a ScriptModule; its modules cannot be seen", hint="trace the eager model"
        )


def select(
    names: Sequence[str], modules: Sequence[nn.Module], patterns: str | Sequence[str]
) -> list[int]:
    """The numbers of the modules that match any pattern.

    A pattern is a glob over the fqn (`layers.*.attn`, `*`, `""` for the root) or over the class
    name (`Linear`, `*Attention`).

    Raises:
        UsageError: There is no pattern.
        NotFound: A pattern matches no module.
    """
    asked = [patterns] if isinstance(patterns, str) else _texts("modules", patterns)
    if not asked:
        raise UsageError("modules=[]: nothing to trace", hint='modules="*" traces all')
    named, found = list(zip(names, modules, strict=True)), set[int]()
    for pattern in asked:
        hits = {i for i, each in enumerate(named) if matches(*each, [pattern])}
        if not hits:
            known = [*names, *{own_class(type(m)).__name__ for m in modules}]
            raise NotFound(
                f"no module matches {pattern!r}",
                hint="patterns are globs over fqns ('layers.*.attn') or class names ('Linear')",
                did_you_mean=difflib.get_close_matches(pattern, known, n=3),
            )
        found |= hits
    return sorted(found)


def matches(name: str, module: nn.Module, patterns: str | Sequence[str]) -> bool:
    """Whether a pattern is one of the module's path or class."""
    asked = [patterns] if isinstance(patterns, str) else patterns
    words = (name, own_class(type(module)).__name__)
    return any(fnmatch.fnmatchcase(word, pattern) for word in words for pattern in asked)


def _texts(what: str, found: Any) -> list[str]:
    """Those of a list of texts, else a UsageError that names it."""
    texts: list[Any] = [*found] if isinstance(found, Iterable) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{what}={found!r}: a list of texts")
    return texts


def other_methods(cls: type) -> list[str]:
    """Public methods besides `forward`, of the class and those above it up to torch's own."""
    bases = [b for b in cls.__mro__ if not b.__module__.startswith("torch.") and b is not object]
    return sorted({n for b in bases for n in vars(b) if is_method(cls, n)})


def is_method(cls: type, name: str) -> bool:
    """Whether it is a public method of the class, and not one that every module has."""
    own = name.isidentifier() and name[0] != "_" and not hasattr(nn.Module, name)
    return own and isinstance(inspect.getattr_static(cls, name, None), types.FunctionType)


def select_methods(
    modules: Sequence[nn.Module], targets: Sequence[int], names: Sequence[str]
) -> dict[int, list[str]]:
    """Per target, those of the methods that its class has. `forward` is always recorded.

    Raises:
        UsageError: `names` is one text, or has a method of every module, such as `train`.
        NotFound: No target has a method of that name.
    """
    if isinstance(names, str):
        raise UsageError(f"methods={names!r}: a list of names", hint=f"use methods=[{names!r}]")
    found: dict[int, list[str]] = {}
    for name in sorted(set(_texts("methods", names)) - {"forward"}):
        if hasattr(nn.Module, name):
            raise UsageError(
                f"{name!r} is a method of every nn.Module", hint="name methods of your own classes"
            )
        hits = [number for number in targets if is_method(type(modules[number]), name)]
        if not hits:
            known = sorted({n for number in targets for n in other_methods(type(modules[number]))})
            raise NotFound(
                f"no module asked for has a method {name!r}",
                hint=f"their methods: {', '.join(known[:8]) or 'forward'}",
                did_you_mean=difflib.get_close_matches(name, known, n=3),
            )
        for number in hits:
            found.setdefault(number, []).append(name)
    return found
