"""Which statements at the top of a file a name needs. Knows code objects; runs nothing."""

from __future__ import annotations

import ast
import dis
import functools
import types
import warnings
from collections.abc import Collection, Iterator, Sequence

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ASSIGNMENTS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)
_CHANGES = (ast.Assign, ast.AugAssign)
_PLAIN = (*_DEFINITIONS, *_ASSIGNMENTS, ast.Try, ast.If, ast.With)
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_BINDS = frozenset({"STORE_NAME", "STORE_GLOBAL"})


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
                wanted |= _used_and_bound(statement)[0].difference(without)
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


def names_of(statement: ast.stmt) -> frozenset[str]:
    """The names that a statement binds in its file, or changes by nothing but constants."""
    if isinstance(statement, _DEFINITIONS):
        return frozenset({statement.name})
    return _used_and_bound(statement)[1]


@functools.lru_cache(maxsize=8192)
def _used_and_bound(statement: ast.stmt) -> tuple[frozenset[str], frozenset[str]]:
    """Names of its file that a statement looks up, when it runs or later, and those it binds.

    Only the compiler tells these from arguments, locals, attributes and a class's own names.
    """
    module = ast.Module([statement], [])
    try:
        with warnings.catch_warnings():  # Python said so when it compiled the file
            warnings.simplefilter("ignore")
            code = compile(module, "<statement>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):  # an edit meanwhile: running it will tell
        names = frozenset(node.id for node in ast.walk(module) if isinstance(node, ast.Name))
        return names, names
    bound = frozenset(i.argval for i in dis.get_instructions(code) if i.opname in _BINDS)
    used = frozenset(_looked_up(code))
    changes = isinstance(statement, _CHANGES) and not bound and len(used) == 1
    # Such as `Layer.size = 3` or `CONFIG["size"] = 3`.
    calls = any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return used, used if changes and not calls else bound


def _looked_up(code: types.CodeType) -> Iterator[str]:
    """What the code, and that inside it, takes from its file, or from Python where it has none."""
    own = set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS and instruction.argval not in own:
            yield instruction.argval
        elif instruction.opname == "STORE_NAME":
            own.add(instruction.argval)
    for inside in code.co_consts:
        if isinstance(inside, types.CodeType):
            yield from _looked_up(inside)
