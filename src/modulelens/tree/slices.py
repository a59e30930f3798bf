"""Which statements at the top of a file a name needs. Knows syntax; runs and reads nothing."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ASSIGNMENTS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)
_PLAIN = (*_DEFINITIONS, *_ASSIGNMENTS, ast.Try, ast.If, ast.With)


def slice_of(body: Sequence[ast.stmt], name: str, without: Collection[str] = ()) -> list[int]:
    """The numbers of the statements that bind `name` and, in turn, the names they use.

    What a statement uses of `without` is not followed.
    """
    wanted, chosen = {name}, set[int]()
    changed = True
    while changed:
        changed = False
        for number, statement in enumerate(body):
            if number in chosen or not isinstance(statement, _PLAIN) or _is_guard(statement):
                continue
            if _always(statement):
                chosen.add(number)
            elif names_of(statement) & wanted:
                chosen.add(number)
                used = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
                wanted |= used.difference(without)
                changed = True
    return sorted(chosen)


def _always(statement: ast.stmt) -> bool:
    # A star import binds names that only running it tells.
    return isinstance(statement, ast.ImportFrom) and (
        statement.module == "__future__" or any(alias.name == "*" for alias in statement.names)
    )


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def names_of(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    names: set[str] = set()
    inside = [statement] if isinstance(statement, _DEFINITIONS) else ast.walk(statement)
    for node in inside:
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
