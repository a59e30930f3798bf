"""What `gc` removed and what `fsck` found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from modulelens.report.quantity import plural, size
from modulelens.report.table import table

_MOST_PROBLEMS = 30


class Problem(Protocol):
    """One thing that is wrong in a repo."""

    @property
    def where(self) -> str:
        """Entry id, blob digest, or file."""
        ...

    @property
    def code(self) -> str:
        """Stable name of the kind of problem."""
        ...

    @property
    def message(self) -> str:
        """What is wrong."""
        ...


def gc_report(*, blobs: int, freed_bytes: int, leftovers: int) -> str:
    """What was removed, and how much room that made."""
    removed = f"removed {plural(blobs, 'unreferenced blob')} ({size(freed_bytes)})"
    return f"{removed} and {plural(leftovers, 'leftover')} of interrupted writers"


def fsck_report(problems: Sequence[Problem]) -> str:
    """One line per problem, or that there is none."""
    if not problems:
        return "no problems"
    rows = [(problem.where, problem.code, problem.message) for problem in problems]
    text = table(("WHERE", "PROBLEM", "WHAT IS WRONG"), rows[:_MOST_PROBLEMS])
    return f"{text}\n{plural(len(rows), 'problem')}"
