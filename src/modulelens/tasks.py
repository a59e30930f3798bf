"""What a worker process does for an entry of a repo: grades it, checks a candidate on it.

Called by name with JSON; knows a repo by its path. The near side is in `repo.py` and `entry.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from modulelens.entry import Entry
from modulelens.environment import is_own
from modulelens.errors import UsageError
from modulelens.measure.imports import loaded_files, note_own
from modulelens.records import Grade
from modulelens.store import LocalStore
from modulelens.store.files import use_one_thread
from modulelens.stored import hold
from modulelens.verify import grade_init, grade_structure


@cache
def _store(repo: str) -> LocalStore:
    # One per process: a blob that many entries need is then checked against its digest once.
    return LocalStore(Path(repo), create=False)


def _entry(repo: str, entry: str, allow: list[str]) -> Entry:
    store = _store(repo)
    return Entry(store, store.metadata(entry), allow)


def grade_task(*, repo: str, entry: str, allow: list[str], structure: Any = None) -> Any:
    """`[grade, whether to come again]`; `structure` is the first time's grade."""
    replay = _entry(repo, entry, allow)._replay()
    if structure is None:
        found, more = grade_structure(replay)
    else:
        found, more = grade_init(replay, msgspec.convert(structure, Grade)), False
    return [msgspec.to_builtins(found), more]


def check_task(*, repo: str, entry: str, allow: list[str], notes: str, **asked: Any) -> Any:
    """`[verdict on today's code or on a file's candidate, packages' modules that it imported]`.

    `asked` are the candidate, the call, and whether backward: what `Entry.check` takes. Which files
    of the user's it imported, `notes` says, also when it ends in another way.
    """
    known = set(sys.modules)
    note_own(notes)
    checked = _entry(repo, entry, allow)._check_here(**asked)
    modules = [name for name, file in loaded_files(known).items() if not is_own(file)]
    return [msgspec.to_builtins(checked), modules]


def hold_task(*, repo: str, entry: str, modules: list[str]) -> list[str]:
    """Lets all later checks find packages imported, and the entry's bytes in memory.

    Returns:
        Files whose edit this process would not see: what is loaded of the user's own and of the
        packages that the entry is made of.
    """
    use_one_thread()
    for name in modules:
        with contextlib.suppress(Exception):  # boundary: a check imports it itself, and tells
            importlib.import_module(name)
    if threading.active_count() > 1:
        raise UsageError(f"among {modules} is one that starts a thread, which no fork has")
    store = _store(repo)
    metadata = store.metadata(entry)
    hold(store, metadata)
    packages = set(metadata.packages) - {"torch"}
    files = loaded_files()
    return [f for name, f in files.items() if name.partition(".")[0] in packages or is_own(f)]
