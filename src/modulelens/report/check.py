"""The verdict of a check: the status, and for a mismatch the leaf and the error."""

from __future__ import annotations

from modulelens.records import Check, LeafCheck
from modulelens.report.quantity import error, plural
from modulelens.report.table import clean, clean_block, indent, table

_MOST_LEAVES = 20


def check_report(check: Check, *, name: str) -> str:
    """One line for a pass; the deciding leaf, the others, and the reason for anything else."""
    parts = [f"{check.status.value}  {clean(name)}, call {check.call}: {_summary(check)}"]
    if check.reason and (check.worst is None or not check.status.passed):
        parts.append(indent(clean_block(check.reason)))
    differing = [leaf for leaf in check.leaves if leaf.status.value != "EXACT"]
    if differing:
        parts.append(indent(_leaves(differing)))
    parts += [f"warning: {clean(text)}" for text in check.warnings]
    return "\n".join(parts)


def worst_line(check: Check) -> str:
    """The leaf that decided, with its error: `output["logits"]: max abs error 0.03 ...`."""
    leaf = check.worst
    if leaf is None:
        return clean(check.reason) or check.status.value
    parts = [clean(leaf.message)] if leaf.message else []
    if leaf.max_abs is not None and "abs" not in leaf.message:
        parts.append(f"max abs error {error(leaf.max_abs)}, max rel error {error(leaf.max_rel)}")
    if leaf.mismatched and "differ" not in leaf.message:
        parts.append(f"{leaf.mismatched:,} of {leaf.numel:,} values differ")
    return f"{clean(leaf.path)}: {'; '.join(parts) or leaf.status.value}"


def _summary(check: Check) -> str:
    if not check.status.passed:
        return worst_line(check)
    compared = plural(len(check.leaves), "tensor")
    if check.status.value == "EXACT":
        return f"{compared} bit-equal"
    return f"{compared} within bounds, worst {worst_line(check)}"


def _leaves(differing: list[LeafCheck]) -> str:
    header = ("LEAF", "STATUS", "MAX ABS", "MAX REL", "x REFERENCE", "DIFFER", "")
    rows = [
        (
            leaf.path,
            leaf.status.value,
            error(leaf.max_abs),
            error(leaf.max_rel),
            error(leaf.error_ratio),
            f"{leaf.mismatched:,}/{leaf.numel:,}" if leaf.numel else "-",
            leaf.message,
        )
        for leaf in differing[:_MOST_LEAVES]
    ]
    text = table(header, rows, right=(2, 3, 4, 5))
    if len(differing) <= _MOST_LEAVES:
        return text
    return f"{text}\n... {plural(len(differing), 'tensor')} differ in all"
