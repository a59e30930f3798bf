"""The user's own loaded modules: what the file of each says. Knows files, no class and no entry.

A constant, a factory or a helper beside a class decides what the class makes, though the class's
own text says nothing of it.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import blake3

_INSTALLED = tuple(
    str(Path(place).resolve())
    for name in ("purelib", "platlib", "stdlib", "platstdlib")
    if (place := sysconfig.get_paths().get(name))
)


#: What held a module's code when it was first looked at, which is what was imported; its digest.
_looked: dict[int, tuple[object, str]] = {}


def own_modules(roots: Iterable[str]) -> dict[str, str]:
    """Name -> digest of each loaded module below these folders that is not installed."""
    folders = tuple(f"{root}/" for root in roots if root)
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = _file_of(module)
        if file.startswith(folders) and not file.startswith(_INSTALLED) and name != "__mp_main__":
            found[name] = digest_of_module(module)
    return {name: digest for name, digest in found.items() if digest}


def changed_modules(known: Mapping[str, str], script: Path | None) -> tuple[str, ...]:
    """Names of those whose code is another one today; what is not loaded here says nothing.

    Args:
        known: Name -> digest then, as `own_modules` gave it.
        script: The script that was `__main__` then, if that may be read.
    """
    found = []
    for name, digest in known.items():
        live = sys.modules.get(name)
        here = Path(_file_of(live) or ".").resolve()
        if name == "__main__" and script is not None and here != script.resolve():
            today = digest_of_code(str(script)) if script.suffix == ".py" else ""
        elif name == "__main__" and script is None:
            continue
        else:
            today = digest_of_module(live)
        if today and today != digest:
            found.append(name)
    return tuple(found)


def digest_of_module(module: object) -> str:
    """Digest of a loaded module's code; empty where it has no Python file.

    That of its file when it was first asked for: an edit is in the module once it is loaded again.
    """
    holder = getattr(module, "__spec__", None) or module  # loading it again makes a new spec
    known = _looked.get(id(holder))
    if known is None:
        known = _looked[id(holder)] = holder, digest_of_code(_file_of(module))
    return known[1]


def digest_of_code(file: str) -> str:
    """Digest of what a file says, comments and layout left out; empty where it can't be read."""
    if not Path(file).is_file():
        return ""
    try:
        data = Path(file).read_bytes()
    except OSError:
        return ""
    # What cannot be parsed is told by its bytes.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        data = ast.dump(ast.parse(data)).encode("utf-8", "surrogatepass")
    return blake3.blake3(data).hexdigest()[:16]


def _file_of(module: object) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else ""
