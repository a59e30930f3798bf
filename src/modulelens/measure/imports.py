"""In a worker: every file of the user's is imported as it is now, and noted.

Knows Python's import system; no modules of torch and no entries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType
from typing import Any

import blake3

from modulelens.environment import is_own

#: Bytecode that is not younger than its source by this may be of the text before: Python compares
#: sizes and whole seconds.
_SAME_MOMENT_S = 0.02


def digest_of_file(path: str) -> str:
    """blake3 hex digest of a file's bytes; empty where there is none that can be read."""
    try:
        return blake3.blake3(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def note_own(notes: str) -> None:
    """From here on, imports append `digest path` lines to the file `notes`, and see every edit.

    One line per file of the user's that is imported, whatever comes of it. Where an import finds
    nothing, one without a digest for each file that would have been taken.
    """
    stats_of: Callable[..., Any] = SourceFileLoader.path_stats

    def note(path: str, digest: str) -> None:
        with Path(notes).open("a") as file:
            file.write(f"{digest} {path}\n")

    def path_stats(self: SourceFileLoader, path: str) -> Any:
        if not is_own(path):
            return stats_of(self, path)
        note(path, digest_of_file(path))  # before the rest: an edit in between is then seen
        stats = stats_of(self, path)
        bytecode = Path(cache_from_source(path))
        if bytecode.exists() and bytecode.stat().st_mtime - stats["mtime"] < _SAME_MOMENT_S:
            bytecode.unlink()  # where that fails, so does this: then the source is compiled
        return stats

    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]
    sys.meta_path.append(_Missing(note))
    for folder in filter(is_own, list(sys.path_importer_cache)):
        del sys.path_importer_cache[folder]  # what a folder lists is known by its time as well


class _Missing:
    """The last finder: it is asked for what no other has found, and finds nothing."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: Any = None) -> None:
        tail = name.rpartition(".")[2]
        for folder in filter(is_own, sys.path if path is None else path):
            for file in (f"{tail}.py", f"{tail}/__init__.py"):
                self._note(f"{folder}/{file}", "")


def loaded_files(known: Container[str] = ()) -> dict[str, str]:
    """Module name -> file, in the order of importing, of what is loaded and not among `known`."""
    new = [name for name in sys.modules if name not in known]
    # Asking the module itself may import what a lazy one stands for.
    modules = {n: m for n in new if isinstance(m := sys.modules[n], ModuleType)}
    files = {name: vars(module).get("__file__") for name, module in modules.items()}
    return {name: file for name, file in files.items() if isinstance(file, str)}
