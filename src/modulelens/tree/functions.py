"""Functions made inside another function: found again as a constant of the importable one around.

Knows code objects; runs nothing. Such a function is named by the importable function, and for
each step inwards the name and the line relative to the enclosing function's first. That is as
stable as a dotted path, needs no source, and two lambdas of one line are told apart by refusing.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from modulelens.errors import NotRebuildable
from modulelens.tree.names import Importer

_LOCALS = ".<locals>."


def local_path(function: types.FunctionType) -> dict[str, Any] | None:
    """`{"outer": path, "steps": [[name, line], ...]}`, None where nothing leads to its code."""
    code = function.__code__
    # `functools.wraps` puts another function's name on it; the code keeps its own.
    outer, *inner = getattr(code, "co_qualname", function.__qualname__).split(_LOCALS)
    module = function.__globals__.get("__name__")
    if not inner or not isinstance(module, str) or any(map(_empty, function.__closure__ or ())):
        return None
    first, *rest = outer.split(".")
    found = function.__globals__.get(first)
    for part in rest:
        found = inspect.getattr_static(found, part, None)
    around = _outer(found)
    if around is None or around.__globals__ is not function.__globals__:
        return None
    steps = next((steps for steps, below in _inside(around.__code__) if below is code), None)
    if steps is None or _at(around.__code__, steps) is not code:
        return None
    return {"outer": f"{module}:{outer}", "steps": steps}


def enclosed(function: types.FunctionType) -> tuple[Any, Any, Any]:
    """What it holds: contents of its cells, defaults, defaults of keywords."""
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return cells, function.__defaults__, function.__kwdefaults__


def make_local(body: dict[str, Any], importer: Importer) -> tuple[Any, tuple[types.CellType, ...]]:
    """The function with empty cells, and its cells, to be filled by the caller.

    Raises:
        NotRebuildable: The function around it is another one today.
    """
    outer = _outer(importer.get(body["outer"]))
    code = _at(outer.__code__, body["steps"]) if outer is not None else None
    held = body["inside"][0]["$tuple"]
    if outer is None or code is None or len(code.co_freevars) != len(held):
        name, line = body["steps"][-1]
        text = f"{body['outer']} makes no {name} at its line {line} any more"
        raise NotRebuildable(text, reason="not_importable")
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, outer.__globals__, code.co_name, None, cells), cells


def _empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the function around has not come to that line yet
        return True
    return False


def _outer(found: Any) -> types.FunctionType | None:
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, types.FunctionType) else None


def _inside(code: types.CodeType) -> Iterator[tuple[list[list[Any]], types.CodeType]]:
    """The steps to each code inside, and the code."""
    for below in code.co_consts:
        if isinstance(below, types.CodeType):
            step = [below.co_name, below.co_firstlineno - code.co_firstlineno]
            yield [step], below
            yield from (([step, *steps], deeper) for steps, deeper in _inside(below))


def _at(code: types.CodeType, steps: list[list[Any]]) -> types.CodeType | None:
    found = [below for there, below in _inside(code) if there == steps]
    return found[0] if len(found) == 1 else None
