"""What the zoo found: rows of one model in one mode, and their tables. Runs nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.models.harness import Report, differences
from tests.models.zoo.architecture import Architecture

from modulelens.records import Fate, Reason

Row = dict[str, Any]
Absence = tuple[str, str, str]
LEVELS = ("exact", "close", "shape", "no")
ASPECTS = ("outputs", "buffers", "param_grads")
COUNTS = ("modules", "called", "recorded", "rebuilt", *LEVELS)
GRADIENTS = (*LEVELS, "none")
# They say that something went wrong, but not what about the module made it so.
NO_CAUSE = {Reason.MISMATCH, Reason.RUNTIME_ERROR, Reason.CRASHED, Reason.TIMEOUT}


def row(of: Architecture, mode: str, report: Report, verify_s: float) -> Row:
    """One model in one mode; a module is as exact as the worse of its outputs and buffers."""
    fates = Counter(one.fate for one in report.coverage)
    levels = Counter(_worse(entry.grade) for entry in report.entries)
    gradients = report.count("param_grads")
    return {
        "model": of.name,
        "family": of.family,
        "mode": mode,
        "modules": len(report.coverage),
        "called": fates[Fate.RECORDED] + fates[Fate.REFUSED],
        "recorded": fates[Fate.RECORDED],
        "rebuilt": sum(_rebuilt(entry.grade) for entry in report.entries),
        **{level: levels[level] for level in LEVELS},
        "gradients": {level: gradients[level] for level in GRADIENTS},
        "strategies": dict(Counter(entry.grade.strategy for entry in report.entries)),
        "reasons": _reasons(report),
        "refused": {c.fqn: c.reason for c in report.coverage if c.fate is not Fate.RECORDED},
        "disturbed": differences(*report.outcomes) if report.steady else [],
        "steady": report.steady,
        "leftovers": report.leftovers,
        "seconds": report.plain_s + report.traced_s + report.add_s + verify_s,
    }


def _worse(grade: Any) -> str:
    found = [grade.outputs, grade.buffers]
    return max((level.value for level in found if level is not None), key=LEVELS.index)


def _rebuilt(grade: Any) -> bool:
    """Whether it ran, and gave something to compare."""
    code = grade.reasons.get("outputs", ("",))[0]
    return grade.outputs.value != "no" or code in {Reason.MISMATCH, Reason.OUTSIDE_ENTROPY}


def _reasons(report: Report) -> list[list[Any]]:
    """Lists of aspect, level, reason's code, its text at the first module, and the modules."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = defaultdict(list)
    for entry in report.entries:
        for aspect in ASPECTS:
            level, why = getattr(entry.grade, aspect), entry.grade.reasons.get(aspect)
            if why or level not in (None, "exact"):
                code, text = why or ("", "no reason was given")
                groups[aspect, str(level), code].append((entry.fqn or "(root)", text))
    return [[*key, modules[0][1], [fqn for fqn, _ in modules]] for key, modules in groups.items()]


def problems(rows: Iterable[Row]) -> list[str]:
    """What must not be: a disturbed step, a leftover, a module without fate, grade or cause."""
    found = []
    for one in rows:
        where = f"{one['model']}, {one['mode']}"
        found += [f"{where}: tracing changed {name}" for name in one["disturbed"]]
        found += [f"{where}: left behind: {name}" for name in one["leftovers"]]
        found += [f"{where}: {fqn}: no reason" for fqn, why in one["refused"].items() if not why]
        for aspect, level, code, text, fqns in one["reasons"]:
            unexplained = level == "no" and code in NO_CAUSE
            if unexplained or not code:
                found.append(f"{where}: {aspect} of {fqns[0]} and {len(fqns) - 1} more: {text}")
    return found


def tables(rows: Sequence[Row]) -> str:
    """Markdown: a line per model, per family, per mode."""
    parts = []
    for by in ("model", "family", "mode"):
        groups: dict[str, list[Row]] = defaultdict(list)
        for one in rows:
            groups[one[by]].append(one)
        lines = [_line(name, group) for name, group in groups.items()]
        parts.append("\n".join([*_head(by), *lines, *([_line("**all**", rows)] if rows else [])]))
    return "\n\n".join(parts)


def _head(by: str) -> tuple[str, str]:
    names = [by, "runs", *COUNTS, "exact %", "gradients", "step undisturbed", "s"]
    return f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)


def _line(name: str, group: Sequence[Row]) -> str:
    sums = [sum(one[count] for one in group) for count in COUNTS]
    gradients = [sum(one["gradients"][level] for one in group) for level in GRADIENTS]
    share = 100 * sum(one["exact"] for one in group) / max(sum(one["recorded"] for one in group), 1)
    cells = [name, len(group), *sums, f"{share:.2f}", " / ".join(map(str, gradients))]
    cells += [_undisturbed(group), f"{sum(one['seconds'] for one in group):.0f}"]
    return f"| {' | '.join(map(str, cells))} |"


def _undisturbed(group: Sequence[Row]) -> str:
    changed = sum(bool(one["disturbed"]) for one in group)
    unsteady = sum(not one["steady"] for one in group)
    words = [f"{changed} CHANGED"] if changed else []
    words += [f"{unsteady} cannot say"] if unsteady else []
    return ", ".join(words) or "bit-equal"


def reasons(rows: Iterable[Row]) -> str:
    """A line per model, aspect and reason, over all modes."""
    groups: dict[tuple[str, ...], list[tuple[str, str, list[str]]]] = defaultdict(list)
    for one in rows:
        for aspect, level, code, text, fqns in one["reasons"]:
            groups[one["model"], aspect, level, code].append((one["mode"], text, fqns))
        if not one["steady"]:
            key = (one["model"], "step", "cannot say", "outside_entropy")
            groups[key].append((one["mode"], "two plain steps differ from each other", []))
    return "\n".join(_reason_line(*key, places) for key, places in groups.items()) or "- nothing"


def _reason_line(
    model: str, aspect: str, level: str, code: str, places: list[tuple[str, str, list[str]]]
) -> str:
    modes = ", ".join(f"{mode} {len(fqns)}" for mode, _, fqns in places)
    fqns = list(dict.fromkeys(fqn for *_, fqns in places for fqn in fqns))
    shown = ", ".join(fqns[:4]) + (f" and {len(fqns) - 4} more" if len(fqns) > 4 else "")
    word = "not comparable" if level == "None" else level
    return f"- {model}, {aspect}: {word}, {code} ({modes}): {shown}: {places[0][1]}"


def absences(absent: Iterable[Absence]) -> str:
    """A line per mode and reason, with the models."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, mode, why in absent:
        groups[mode, why].append(name)
    lines = [f"- {mode}: {why}: {', '.join(names)}" for (mode, why), names in groups.items()]
    return "\n".join(lines) or "- nothing"
