"""What a worker process does for an entry of a repo: grades it, checks a candidate on it.

Called by name with JSON; knows a repo by its path. The near side is in `repo.py` and `entry.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from modulelens.entry import Entry
from modulelens.measure.candidate import load_candidate
from modulelens.records import Grade
from modulelens.store import LocalStore
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


def check_task(
    *, repo: str, entry: str, allow: list[str], candidate: str, call: int | None, backward: bool
) -> Any:
    """Checks one candidate of a file."""
    found = _entry(repo, entry, allow)
    found._replay()  # makes the entry's package importable, which the candidate may import
    checked = found.check(load_candidate(candidate), call, backward)
    return msgspec.to_builtins(msgspec.structs.replace(checked, code=candidate))
