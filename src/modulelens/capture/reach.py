"""What a class's code reaches of the user's own beside it: helpers, constants, factories, bases.

They decide what a constructor makes, though the class's own text says nothing of it. Read from the
files of loaded modules, statement by statement; nothing is run, and what is not reached counts not.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import blake3
from torch import nn

from modulelens.environment import is_own
from modulelens.tree.slices import names_of, slice_of


@functools.lru_cache(maxsize=4096)
def reached(cls: type) -> dict[str, str]:
    """`module:name` -> digest of what binds the name, comments and layout left out.

    The class itself and other modules' classes are left out, which are looked at by themselves; its
    bases are not.
    """
    own = cls.__module__, cls.__qualname__.partition(".")[0]
    found: dict[str, list[str]] = {}
    pending = [own, *((b.__module__, b.__qualname__.partition(".")[0]) for b in cls.__mro__[1:])]
    seen = set(pending)
    while pending:
        place = where, name = pending.pop()
        names, body = _names(where, cls), _body(where, cls)
        apart = {key for key, value in names.items() if _is_module_class(value)}
        chosen = [body[number] for number in slice_of(body, name, apart)]
        for statement in chosen:
            bound = names_of(statement)
            if place != own or name not in bound:
                label = f"{where}:{min(bound, default='*')}"
                found.setdefault(label, []).append(ast.dump(statement))
        for target in _imported(where, chosen):
            if target not in seen and not _is_module_class(_names(target[0], cls).get(target[1])):
                seen.add(target)
                pending.append(target)
    texts = {label: "".join(sorted({*each})) for label, each in found.items()}
    return {
        label: blake3.blake3(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        for label, text in texts.items()
    }


def changed(cls: type, then: Mapping[str, str]) -> tuple[str, ...]:
    """Those names among what the class reaches now that said something else `then`."""
    today = reached(cls) if then else {}
    return tuple(sorted(n for n, digest in today.items() if then.get(n, digest) != digest))


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _names(where: str, cls: type) -> dict[str, Any]:
    """What a module's names stand for; of the class's own module, which need not be loaded."""
    functions = [f for f in vars(cls).values() if isinstance(f, FunctionType)]
    if where == cls.__module__ and functions:
        return functions[0].__globals__
    module = sys.modules.get(where)
    return vars(module) if isinstance(module, ModuleType) else {}


def _body(where: str, cls: type) -> list[ast.stmt]:
    """The statements of a module of the user's own, of one that is not loaded yet as well."""
    path = Path(str(_names(where, cls).get("__file__") or _file_of(where)))
    if path.suffix != ".py" or not is_own(str(path)) or not path.is_file():
        return []
    with contextlib.suppress(OSError):
        return _parsed(path, path.stat().st_mtime_ns, path.stat().st_size)
    return []


def _file_of(where: str) -> str:
    """The file of a module that is not loaded yet: a constructor may be what imports it."""
    parent = where.rpartition(".")[0]
    if not where or (parent and parent not in sys.modules):
        return ""  # finding it would run its packages
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(where)
        return str(spec.origin) if spec else ""
    return ""


@functools.lru_cache(maxsize=1024)
def _parsed(path: Path, *_stamp: int) -> list[ast.stmt]:
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        return ast.parse(path.read_bytes()).body
    return []


def _imported(where: str, statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """`(module, name)` of what statements use from other modules."""
    package = getattr(sys.modules.get(where), "__package__", None) or ""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    used = sorted({node.id for node in nodes if isinstance(node, ast.Name)})
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, target, inside in _bindings(node, package):
                if not inside:
                    modules[name] = target
                elif inside == "*":
                    yield from ((target, each) for each in used)
                else:
                    yield target, inside
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from _attribute(node, modules)


def _bindings(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str, str]]:
    """`(name, module, what of it)` for each name that an import binds; "" for the module itself."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield alias.asname or first, alias.name if alias.asname else first, ""
        return
    target = "." * node.level + (node.module or "")
    with contextlib.suppress(ImportError):
        target = importlib.util.resolve_name(target, package)
    for alias in node.names:
        name, path = alias.asname or alias.name, f"{target}.{alias.name}"
        yield (name, path, "") if path in sys.modules else (name, target, alias.name)


def _attribute(node: ast.expr, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What `a.b.c` is where `a` is a module: the name within the last module of the chain."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in modules:
        target = modules[node.id]
        while len(names) > 1 and f"{target}.{names[-1]}" in sys.modules:
            target += f".{names.pop()}"
        yield target, names[-1]
