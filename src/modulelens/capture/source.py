"""The source of a class: file, text, digest. Knows that what a file says may not be what ran."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import textwrap
from pathlib import Path
from types import CodeType

import blake3

from modulelens.records import SourceRef
from modulelens.tree import display_path, path_of


@functools.lru_cache(maxsize=4096)
def source_of(cls: type) -> SourceRef:
    """Where the class comes from. `reliable` is False when its text is not the code that ran."""
    path = display_path(cls)
    file = _file(cls)
    text, line, reliable = _text(cls, file)
    return SourceRef(
        path=path,
        file=file,
        line=line,
        root=_root(cls, file),
        text=text,
        digest=source_digest(text),
        reliable=reliable,
        importable=path_of(cls) is not None,
    )


def source_digest(text: str) -> str:
    """Digest of a class's text, without its indentation."""
    plain = textwrap.dedent(text).encode("utf-8", "replace")
    return blake3.blake3(plain).hexdigest() if text else ""


def _file(cls: type) -> str:
    # What the methods say comes first: `__main__` may be another script by now.
    for code in map(_code, vars(cls).values()):
        if code is not None and not code.co_filename.startswith("<") and _is_own(code, cls):
            return _resolved(code)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else ""


def _resolved(code: CodeType) -> str:
    return str(Path(code.co_filename).resolve())


def _is_own(code: CodeType, cls: type) -> bool:
    qualname = getattr(code, "co_qualname", "")  # from Python 3.11 on
    return not qualname or qualname.startswith(f"{cls.__qualname__}.")


def _code(member: object) -> CodeType | None:
    function = inspect.unwrap(member) if callable(member) else member
    return getattr(function, "__code__", None)


def _text(cls: type, file: str) -> tuple[str, int, bool]:
    """The class block whose methods are the ones that run, not merely the first of that name."""
    linecache.checkcache(file)
    codes = [c for c in map(_code, vars(cls).values()) if c is not None and _is_own(c, cls)]
    # A notebook's cell is no file, but Python knows its lines.
    cell = "" if file else next((c.co_filename for c in codes), "")
    lines = linecache.getlines(file or cell)
    starts = sorted(c.co_firstlineno for c in codes if c.co_filename.endswith(Path(file).name))
    first = getattr(cls, "__firstlineno__", 0)
    if lines and starts:
        head = f"class {cls.__name__}"
        for number in range(starts[0] - 1, -1, -1):
            if lines[number].lstrip().startswith(head):
                first = number + 1
                break
    if lines and first:
        block = inspect.getblock(lines[first - 1 :])
        forward = _code(vars(cls).get("forward"))
        if forward is not None and any("def forward(" in line for line in block):
            own = forward.co_filename == cell if cell else _resolved(forward) == file
            starts.append(forward.co_firstlineno if own else 0)
        inside = all(first <= start < first + len(block) for start in starts)
        return "".join(block), first, inside
    try:
        found, number = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return "", 0, False
    return "".join(found), number, True


def _root(cls: type, file: str) -> str:
    """The folder that has to be on `sys.path` for importing the class."""
    if not file or file.startswith("<"):
        return ""
    module = cls.__module__
    if module == "__main__":
        return str(Path(file).parent)
    depth = module.count(".") + (Path(file).stem == "__init__")
    return str(Path(file).parents[min(depth, len(Path(file).parents) - 1)])
