"""A candidate's name -> the class, module or function that is to be judged. Runs its file."""

from __future__ import annotations

import difflib
import itertools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from modulelens.errors import CandidateBroken, NotFound, UsageError, text_of

_number = itertools.count()


def load_candidate(candidate: str | nn.Module | Callable[..., Any]) -> Any:
    """What `candidate` names; a module, class or callable is returned as it is.

    Args:
        candidate: "path/file.py:Name"; `Name` may be dotted. The file is run anew each time, as a
            module of its own that nothing else can import; its folder can be imported from.

    Raises:
        UsageError: Not of that form, or the name is neither a module nor callable.
        NotFound: No such file, or no such name in it.
        CandidateBroken: The file has a syntax error or raised; `line` says where.
    """
    if not isinstance(candidate, str):
        return candidate
    file, separator, name = candidate.rpartition(":")
    if not separator or not name.replace(".", "").isidentifier():
        raise UsageError(f"{candidate!r} names no candidate", hint='write "path/file.py:Name"')
    path = Path(file).resolve()
    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise NotFound(f"there is no file {file}", did_you_mean=_near(path.name, near))
    found: Any = _run_file(path)
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise NotFound(f"{file} defines no {name!r}", did_you_mean=_near(part, names))
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{name} in {file} is a {type(found).__name__}, which cannot be called")
    return found


def _run_file(path: Path) -> ModuleType:
    """Compiles from source: a cached bytecode file misses an edit within the same second."""
    name = f"_modulelens_candidate_{next(_number)}"
    module = ModuleType(name)
    module.__file__ = str(path)
    folder = str(path.parent)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # boundary: the candidate's own code
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _broken(path, error) from error
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # for imports inside functions; last, so that it hides nothing
    return module


def _broken(path: Path, error: BaseException) -> CandidateBroken:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line, text = error.lineno or 0, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno or 0 for f in reversed(frames) if f.filename == str(path)), 0)
        text = text_of(error)
    kind = type(error).__name__
    return CandidateBroken(
        f"{path}:{line}: {kind}: {text}",
        kind=kind,
        line=line,
        traceback=text_of("".join(traceback.format_exception(error))),
        hint="the file is run from top to bottom; it must import on its own",
    )


def _near(name: str, names: list[str]) -> list[str]:
    return difflib.get_close_matches(name, names, n=3, cutoff=0.5)
