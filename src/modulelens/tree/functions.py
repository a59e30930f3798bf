"""Functions made inside another function: found again as a constant of the importable one around.

Knows code objects; runs nothing. Such a function is named by the importable function, and for
each step inwards the name and the line relative to the enclosing function's first. That is as
stable as a dotted path, needs no source, and two lambdas of one line are told apart by refusing.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from modulelens.errors import NotRebuildable
from modulelens.tree.names import Importer, path_of

_LOCALS = ".<locals>."


def local_path(function: types.FunctionType) -> dict[str, Any] | None:
    """`{"outer": path, "steps": [[name, line], ...]}`, None where nothing leads to its code."""
    code = function.__code__
    # `functools.wraps` puts another function's name on it; the code keeps its own.
    outer, *inner = getattr(code, "co_qualname", function.__qualname__).split(_LOCALS)
    module = function.__globals__.get("__name__")
    if not inner or not isinstance(module, str) or any(map(_empty, function.__closure__ or ())):
        return None
    around = _outer(_found(f"{module}:{outer}", function.__globals__))
    if around is None or around.__globals__ is not function.__globals__:
        return None
    path = path_of(around) or f"{module}:{outer}"
    steps, here = [], around.__code__
    for name in ".".join(inner).split("."):
        below = [c for c in _codes(here) if c.co_name == name and _reaches(c, code)]
        if len(below) != 1:
            return None
        steps.append([name, below[0].co_firstlineno - here.co_firstlineno])
        here = below[0]
    unique = here is code and _step(around.__code__, steps) is code
    return {"outer": path, "steps": steps} if unique else None


def make_local(body: dict[str, Any], importer: Importer) -> tuple[Any, tuple[types.CellType, ...]]:
    """The function with empty cells, and its cells, to be filled by the caller.

    Raises:
        NotRebuildable: The function around it is another one today.
    """
    outer = _outer(importer.get(body["outer"]))
    code = _step(outer.__code__, body["steps"]) if outer is not None else None
    if outer is None or code is None or len(code.co_freevars) != len(body["cells"]):
        name = body["steps"][-1][0]
        raise NotRebuildable(
            f"{body['outer']} makes no {name} at its line {body['steps'][-1][1]} any more",
            reason="not_importable",
        )
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, outer.__globals__, code.co_name, None, cells), cells


def _empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the function around has not come to that line yet
        return True
    return False


def _found(path: str, scope: dict[str, Any]) -> Any:
    found: Any = None
    for place, part in enumerate(path.partition(":")[2].split(".")):
        found = scope.get(part) if place == 0 else inspect.getattr_static(found, part, None)
    return found


def _outer(found: Any) -> types.FunctionType | None:
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, types.FunctionType) else None


def _codes(code: types.CodeType) -> list[types.CodeType]:
    return [c for c in code.co_consts if isinstance(c, types.CodeType)]


def _reaches(code: types.CodeType, target: types.CodeType) -> bool:
    return code is target or any(_reaches(below, target) for below in _codes(code))


def _step(code: types.CodeType, steps: list[list[Any]]) -> types.CodeType | None:
    for name, line in steps:
        fits = [
            c
            for c in _codes(code)
            if c.co_name == name and c.co_firstlineno - code.co_firstlineno == line
        ]
        if len(fits) != 1:
            return None
        code = fits[0]
    return code
