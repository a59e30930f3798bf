"""The table of `ls` and `find`: one line per entry. Sees rows by their fields, knows no store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from modulelens.report.quantity import count, plural, size
from modulelens.report.table import table


class Row(Protocol):
    """What a line of the table needs to know about an entry."""

    @property
    def name(self) -> str:
        """`model/fqn`."""
        ...

    @property
    def version(self) -> int:
        """Number within the collection."""
        ...

    @property
    def cls(self) -> str:
        """Path of the class."""
        ...

    @property
    def params(self) -> int:
        """Number of parameters."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the module's own tensors."""
        ...

    @property
    def grade(self) -> str | None:
        """Level of the grade, None before verification."""
        ...

    @property
    def date(self) -> str | None:
        """ISO date and time of creation."""
        ...

    @property
    def tags(self) -> Sequence[str]:
        """Tags of this version."""
        ...

    @property
    def tables(self) -> Sequence[str]:
        """Embedding tables of which rows were kept: name, number kept and number of all."""
        ...


def rows_table(rows: Sequence[Row], *, total: int, offset: int = 0) -> str:
    """The table, and a last line that says how much of the whole it is."""
    if not rows:
        return "no entries" if total == 0 else f"no entries from offset {offset} on; {total} in all"
    partly = any(row.tables for row in rows)
    header = ("ENTRY", "CLASS", "PARAMS", "SIZE", "GRADE", "DATE", "TAGS", "ROWS KEPT")[
        : 7 + partly
    ]
    lines = [
        (
            f"{row.name}@v{row.version}",
            row.cls.replace(":", ".").rsplit(".", 1)[-1],
            count(row.params),
            size(row.bytes),
            row.grade or "-",
            (row.date or "")[:16].replace("T", " "),
            ",".join(row.tags),
            _rows_kept(row.tables),
        )[: 7 + partly]
        for row in rows
    ]
    last = offset + len(rows)
    whole = plural(total, "entry")
    shown = whole if len(rows) == total else f"{offset + 1}-{last} of {whole}"
    if last < total:
        shown += f"; --offset {last} shows more"
    return f"{table(header, lines, right=(2, 3))}\n{shown}"


def _rows_kept(tables: Sequence[str]) -> str:
    more = f" and {plural(len(tables) - 1, 'more table')}" if len(tables) > 1 else ""
    return f"{tables[0]}{more}" if tables else ""
