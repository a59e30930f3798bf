"""Classes that were defined in a script (`__main__`): their definitions, without running it.

Takes from the file only the statements that the class needs: imports, definitions, and the
assignments of the names that these use. A training loop at module level does not run.
"""

from __future__ import annotations

import ast
import builtins
import functools
import os
import sys
import types
from pathlib import Path
from typing import Any

from modulelens.errors import ClassNotFound

_BINDING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_PLAIN = (*_BINDING, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Try, ast.If, ast.With)


def class_of_script(file: str, name: str) -> Any:
    """The class (or function) of that qualified name from a script.

    Raises:
        ClassNotFound: The file is not there, not the user's, or does not define the name.
    """
    path = Path(file)
    if not file or not path.is_file():
        raise ClassNotFound(
            f"__main__:{name} was defined in {file or 'an interactive session'}, which is not here",
            hint="put the class into a module that can be imported, or run where the script is",
        )
    if hasattr(os, "getuid") and path.stat().st_uid not in (0, os.getuid()):
        raise ClassNotFound(
            f"{file} belongs to another user; its code is not run", hint="copy it and trace again"
        )
    found: Any = vars(
        _definitions(str(path.resolve()), path.stat().st_mtime_ns, name.partition(".")[0])
    )
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        if found is None:
            raise ClassNotFound(f"{file} defines no {name!r} any more", hint="was it renamed?")
    return found


@functools.lru_cache(maxsize=256)
def _definitions(file: str, _modified: int, name: str) -> types.ModuleType:
    source = Path(file).read_text()
    try:
        body = ast.parse(source, file).body
    except SyntaxError as error:
        raise ClassNotFound(f"{file}:{error.lineno}: {error.msg}", hint="mend the file") from error
    needed = _slice(body, name)
    module = types.ModuleType("__main__")
    module.__file__ = file
    folder = str(Path(file).parent)
    sys.path.append(folder)
    try:
        code = compile(ast.Module(needed, []), file, "exec", dont_inherit=True)
        exec(code, vars(module))
    except Exception as error:  # boundary: the user's definitions
        raise ClassNotFound(
            f"{file}: {type(error).__name__}: {error}", hint="its definitions do not run"
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def _slice(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements that bind `name` and, in turn, the names they use."""
    wanted, chosen = {name}, set[int]()
    changed = True
    while changed:
        changed = False
        for number, statement in enumerate(body):
            if number in chosen or not isinstance(statement, _PLAIN) or _is_guard(statement):
                continue
            if _always(statement):
                chosen.add(number)
            elif _bound(statement) & wanted:
                chosen.add(number)
                wanted |= _used(statement)
                changed = True
    return [body[number] for number in sorted(chosen)]


def _always(statement: ast.stmt) -> bool:
    # A star import binds names that only running it tells.
    return isinstance(statement, ast.ImportFrom) and (
        statement.module == "__future__" or any(alias.name == "*" for alias in statement.names)
    )


def _is_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


def _used(statement: ast.stmt) -> set[str]:
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names - set(vars(builtins))
