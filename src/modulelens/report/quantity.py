"""Numbers as people read them. Knows units and rounding, nothing of what is counted."""

from __future__ import annotations

from collections.abc import Mapping

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def count(value: float) -> str:
    """A count with three digits and an SI letter: `39.1M`, `512`."""
    for unit, letter in _SI:
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def rows_of(tables: Mapping[str, tuple[int, int]], limit: int = 4) -> str:
    """Of each table: the rows that are there, of how many."""
    told = [f"{name} rows {kept:,} of {total:,}" for name, (kept, total) in tables.items()]
    more = [f"... {plural(len(told), 'table')} in all"] if len(told) > limit else []
    return ", ".join([*told[:limit], *more])


def size(nbytes: int) -> str:
    """Bytes in decimal units, as `ls -l --si` shows them: `1.05 MB`."""
    for unit, letter in _SI:
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.3g} {letter}B"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Seconds with three digits in the unit that fits: `1.32 ms`."""
    for unit, name in _TIME:
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def error(value: float | None) -> str:
    """A numeric error with three digits, `-` where none was computed."""
    return "-" if value is None else f"{value:.3g}"


def plural(number: int, noun: str) -> str:
    """`1 call`, `3 calls`, `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"
