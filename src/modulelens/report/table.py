"""Rows to aligned plain text. Knows widths and escapes, not what the cells mean."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_CELL = 160


def clean(text: str) -> str:
    r"""`text` on one line, with control characters shown as escapes such as `\x1b`.

    Captured names and messages come from strangers; a terminal must never obey them.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clean_block(text: str) -> str:
    """Like `clean`, line by line: source text and tracebacks keep their lines and tabs."""
    return "\n".join(clean(line.expandtabs(4)) for line in text.splitlines())


def shorten(text: str, limit: int) -> str:
    """`text` cut in its middle to at most `limit` characters."""
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 2
    return f"{text[: limit - 3 - tail]}...{text[len(text) - tail :]}"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> str:
    """Columns two blanks apart, a header in capitals; columns numbered in `right` flush right."""
    cells = [[shorten(clean(cell), _LONGEST_CELL) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A label and its value per line, values aligned; empty values are left out."""
    shown = [(label, value) for label, value in rows if value]
    width = max((len(label) for label, _ in shown), default=0)
    return "\n".join(
        f"{label.ljust(width)}  {shorten(clean(value), 4 * _LONGEST_CELL)}"
        for label, value in shown
    )


def indent(text: str, by: int = 2) -> str:
    """`text` with every line moved right."""
    return "\n".join(" " * by + line if line else line for line in text.splitlines())
