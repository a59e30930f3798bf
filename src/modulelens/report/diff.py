"""What differs between two entries, computed from their records alone, and as text."""

from __future__ import annotations

import difflib

import msgspec

from modulelens.records import Metadata
from modulelens.report.entry import grade_line
from modulelens.report.entry_view import init_text
from modulelens.report.quantity import duration, plural
from modulelens.report.structure import signature, value
from modulelens.report.table import clean, indent, shorten, table

_LONGEST_DIFF = 200
_LONGEST_LINE = 200


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One differing field, both values as text."""

    field: str
    old: str
    new: str


class EntryDiff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The differences between two entries. `source` is a unified diff of the class's text.

    `same_state` tells whether parameters, buffers, attributes and children, all the way down,
    were equal at the first call; it compares digests and reads no tensor.
    """

    old: str
    new: str
    same_state: bool
    changes: tuple[Change, ...] = ()
    source: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing that is compared differs."""
        return self.same_state and not self.changes and not self.source


def entry_diff(old: Metadata, new: Metadata) -> EntryDiff:
    """Compares class, constructor call, source, calls, environment, grade and speed."""
    before, after = _facts(old), _facts(new)
    changes = tuple(
        Change(field=field, old=before.get(field, ""), new=after.get(field, ""))
        for field in [*before, *(field for field in after if field not in before)]
        if before.get(field, "") != after.get(field, "")
    )
    names = [f"{m.name}@v{m.version}" for m in (old, new)]
    source = difflib.unified_diff(_source(old), _source(new), names[0], names[1], lineterm="", n=2)
    return EntryDiff(
        old=names[0],
        new=names[1],
        same_state=old.node == new.node,
        changes=changes,
        source=tuple(source),
    )


def diff_report(diff: EntryDiff) -> str:
    """A table of the fields that differ, then the source's diff."""
    lines = [" -> ".join(shorten(clean(name), _LONGEST_LINE) for name in (diff.old, diff.new))]
    if diff.empty:
        return f"{lines[0]}: no difference"
    lines.append(f"state at the first call: {'equal' if diff.same_state else 'differs'}")
    if diff.changes:
        rows = [(change.field, change.old, change.new) for change in diff.changes]
        lines.append(table(("FIELD", "OLD", "NEW"), rows))
    if diff.source:
        shown = (shorten(clean(line), _LONGEST_LINE) for line in diff.source[:_LONGEST_DIFF])
        lines.append(indent("\n".join(shown)))
    if len(diff.source) > _LONGEST_DIFF:
        lines.append(f"... {plural(len(diff.source), 'line')} in all")
    return "\n".join(lines)


def _facts(metadata: Metadata) -> dict[str, str]:
    env = metadata.environment
    facts = {
        "class": metadata.cls,
        "params": f"{metadata.params:,}",
        "init": init_text(metadata) or "not seen",
        "calls": str(len(metadata.calls)),
        "grade": grade_line(metadata.grade),
        "tags": ", ".join(metadata.tags),
        "torch": env.torch,
        "python": env.python,
        "devices": ", ".join(env.devices),
        "git": env.git_commit[:10] + (" + changes" if env.git_dirty else ""),
    }
    for call in metadata.calls:
        facts[f"call {call.index} in"] = signature(call.args, call.kwargs)
        facts[f"call {call.index} out"] = value(call.output)
    if metadata.measurement is not None:
        facts["median"] = duration(metadata.measurement.median_s)
    return facts


def _source(metadata: Metadata) -> list[str]:
    return metadata.source.text.splitlines() if metadata.source else []
