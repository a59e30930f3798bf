"""What became of each module a trace was asked for: never silently nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from modulelens.records import Coverage, Fate
from modulelens.report.quantity import plural, rows_of
from modulelens.report.table import table


def coverage_report(coverage: Sequence[Coverage], *, limit: int = 20) -> str:
    """The counts by fate, then each module that was not recorded, with its reason."""
    if not coverage:
        return "no module matched"
    fates = Counter(item.fate for item in coverage)
    counts = ", ".join(f"{fates[fate]} {fate.value}" for fate in Fate if fates[fate])
    lines = [f"{plural(len(coverage), 'module')}: {counts}"]
    missed = [c for c in coverage if c.fate is not Fate.RECORDED or c.dropped_calls or c.reason]
    if missed:
        rows = [(item.fqn or "(root)", item.cls, item.fate.value, _why(item)) for item in missed]
        lines.append(table(("MODULE", "CLASS", "FATE", "REASON"), rows[:limit]))
    tables = {".".join((c.fqn, n)).strip("."): r for c in coverage for n, r in c.table_rows.items()}
    if tables:
        lines.append(f"tables: {rows_of(tables, limit)}")
    if len(missed) > limit:
        lines.append(f"... {plural(len(missed), 'line')} in all")
    return "\n".join(lines)


def _why(item: Coverage) -> str:
    parts = [item.reason] if item.reason else []
    if item.dropped_calls:
        parts.append(f"{plural(item.dropped_calls, 'call')} beyond the limit dropped")
    return "; ".join(parts)
