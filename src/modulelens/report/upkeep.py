"""What `gc` removed and what `fsck` found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from modulelens.report.quantity import plural, size
from modulelens.report.table import clean, table

_MOST_LINES = 30


class Problem(Protocol):
    """One thing that is wrong in a repo."""

    @property
    def subject(self) -> str:
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


def gc_report(
    *, blobs: int, freed_bytes: int, leftovers: int, unreadable: Sequence[str] = ()
) -> str:
    """What was removed, how much room that made, and which entries could not be read."""
    lines = [
        f"removed {plural(blobs, 'unreferenced blob')} ({size(freed_bytes)}) "
        f"and {plural(leftovers, 'leftover')} of interrupted writers"
    ]
    lines += [f"unreadable: {clean(entry)}" for entry in unreadable[:_MOST_LINES]]
    return "\n".join(lines)


def fsck_report(problems: Sequence[Problem], *, entries: int, blobs: int) -> str:
    """One line per problem, or that there is none."""
    checked = f"{plural(entries, 'entry')} and {plural(blobs, 'blob')} checked"
    if not problems:
        return f"no problems; {checked}"
    rows = [(problem.subject, problem.code, problem.message) for problem in problems]
    text = table(("WHERE", "PROBLEM", "WHAT IS WRONG"), rows[:_MOST_LINES])
    return f"{text}\n{plural(len(rows), 'problem')}; {checked}"
