"""The verdict of a check: the status, and for a mismatch the leaf and the error."""

from __future__ import annotations

from modulelens.records import Check, LeafCheck
from modulelens.report.quantity import error, plural
from modulelens.report.table import clean, clean_block, indent, table

_MOST_LEAVES = 20
_MOST_FILES = 3


def check_report(check: Check, *, name: str) -> str:
    """One line for a pass; the deciding leaf, the others, and the reason for anything else."""
    told = f"{clean(name)}, call {check.call}: {_summary(check)}{_edit(check)}"
    parts = [f"{check.status.value}  {told}"]
    if check.worst is None and len(check.reason.splitlines()) > 1:
        parts.append(indent(clean_block(check.reason)))
    differing = [leaf for leaf in check.leaves if leaf.status.value != "EXACT"]
    if differing:
        parts.append(indent(_leaves(differing, check.worst)))
    parts += [f"warning: {clean(text)}" for text in check.warnings]
    if check.printed.strip():
        parts.append("it printed:\n" + indent(clean_block(check.printed.rstrip())))
    return "\n".join(parts)


def worst_line(check: Check) -> str:
    """The leaf that decided, with its error: `output["logits"]: max abs error 0.03 ...`."""
    leaf = check.worst
    if leaf is None:
        # Of a traceback the last line says what happened.
        return clean((check.reason.splitlines() or [check.status.value])[-1])
    parts = []
    if leaf.max_abs is not None:
        parts.append(f"max abs error {error(leaf.max_abs)}, max rel error {error(leaf.max_rel)}")
    if leaf.message:
        parts.append(clean(leaf.message))
    elif leaf.mismatched:
        parts.append(f"{leaf.mismatched:,} of {leaf.numel:,} values differ")
    return f"{clean(leaf.path)}: {'; '.join(parts) or leaf.status.value}"


def _summary(check: Check) -> str:
    if not check.status.passed:
        return worst_line(check)
    compared = plural(len(check.leaves), "tensor")
    if check.status.value == "EXACT":
        return f"{compared} bit-equal"
    return f"{compared} within bounds, worst {worst_line(check)}"


def _edit(check: Check) -> str:
    """In an edit loop: how soon the verdict came, and which files had changed."""
    if check.after_save_s is None:
        return ""
    files, more = check.changed[:_MOST_FILES], len(check.changed) - _MOST_FILES
    names = ", ".join(map(clean, files)) or "the save"
    return f" ({check.after_save_s:.2f} s after {names}{f' and {more} more' if more > 0 else ''})"


def _leaves(differing: list[LeafCheck], worst: LeafCheck | None) -> str:
    header = ("LEAF", "STATUS", "MAX ABS", "MAX REL", "x REFERENCE", "DIFFER", "")
    rows = [
        (
            leaf.path,
            leaf.status.value,
            error(leaf.max_abs),
            error(leaf.max_rel),
            error(leaf.error_ratio),
            f"{leaf.mismatched:,}/{leaf.numel:,}" if leaf.numel else "-",
            "" if leaf is worst else leaf.message,
        )
        for leaf in differing[:_MOST_LEAVES]
    ]
    text = table(header, rows, right=(2, 3, 4, 5))
    if len(differing) <= _MOST_LEAVES:
        return text
    return f"{text}\n... {plural(len(differing), 'tensor')} differ in all"
