"""Real models, tiny and random: one step traced, stored, rebuilt in a worker and graded.

Prints a table per model and writes JSON. Judges nothing itself: the grades are the repo's.

    python -m benchmarks.models [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import collections
import json
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tests.models.harness import Case, Report, assert_undisturbed, observe_all

import modulelens as ml
from modulelens.records import Fate

_ASPECTS = ("outputs", "buffers", "param_grads")
_LEVELS = ("exact", "close", "shape", "no")


def main() -> None:
    """Runs every model and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of models; all")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        for library, cases in zoo().items():
            chosen = [case for case in cases if not asked.only or case.name in asked.only]
            if chosen:
                reports |= observe_all(chosen, ml.Repo(Path(folder) / library))
    wall_s = time.perf_counter() - started
    rows = [row(report) for report in reports.values()]
    if asked.json:
        asked.json.write_text(json.dumps({"models": rows, "wall_s": wall_s}, indent=2) + "\n")
    print(table(rows))
    print("\nNot exact, or not graded:\n")
    print("\n".join(reasons(reports.values())))
    print(f"\nwall_s {wall_s:.0f}; torch {torch.__version__}")


def zoo() -> dict[str, list[Case]]:
    """The models of each library that is installed."""
    from tests.models import transformers_zoo

    found = {"transformers": transformers_zoo.CASES}
    try:
        from tests.models import torchrec_zoo
    except (ImportError, OSError) as missing:
        print(f"without torchrec: {missing}\n")
        return found
    return found | {"torchrec": torchrec_zoo.CASES}


def row(report: Report) -> dict[str, Any]:
    """One model's numbers; `undisturbed` compares the traced step with the plain one."""
    fates = collections.Counter(one.fate for one in report.coverage)
    try:
        assert_undisturbed(report)
        undisturbed = True
    except AssertionError:
        undisturbed = False
    return {
        "model": report.case.name,
        "modules": len(report.coverage),
        "called": fates[Fate.RECORDED] + fates[Fate.REFUSED],
        "recorded": fates[Fate.RECORDED],
        "calls": sum(one.calls for one in report.coverage),
        **{aspect: dict(report.count(aspect)) for aspect in _ASPECTS},
        "undisturbed": undisturbed,
        "plain_s": report.plain_s,
        "traced_s": report.traced_s,
        "add_s": report.add_s,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line per model. Grades read exact / close / shape / no."""
    lines = [
        "| model | modules | called | recorded | outputs | buffers, arguments | param_grads "
        "| step undisturbed | plain s | traced s | add s |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for one in [*rows, totals(rows)]:
        grades = [" / ".join(str(one[a].get(level, 0)) for level in _LEVELS) for a in _ASPECTS]
        seconds = [f"{one[name]:.2f}" for name in ("plain_s", "traced_s", "add_s")]
        cells = [one["model"], one["modules"], one["called"], one["recorded"], *grades]
        cells += ["bit-equal" if one["undisturbed"] else "NO", *seconds]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all models."""
    undisturbed = all(one["undisturbed"] for one in rows)
    summed: dict[str, Any] = {"model": "**all**", "undisturbed": undisturbed}
    for name in ("modules", "called", "recorded", "plain_s", "traced_s", "add_s"):
        summed[name] = sum(one[name] for one in rows)
    for aspect in _ASPECTS:
        grades: collections.Counter[str] = collections.Counter()
        for one in rows:
            grades.update(one[aspect])
        summed[aspect] = grades
    return summed


def reasons(reports: Iterable[Report]) -> list[str]:
    """One line per model, aspect and reason, with the modules."""
    lines = []
    for report in reports:
        for aspect in _ASPECTS:
            groups: dict[str, list[str]] = {}
            for fqn, (reason, _) in report.reasons(aspect).items():
                groups.setdefault(reason, []).append(fqn or "(root)")
            lines += [
                f"- {report.case.name}, {aspect}: {reason} ({len(fqns)}): {', '.join(fqns)}"
                for reason, fqns in groups.items()
            ]
    return lines or ["- none"]


if __name__ == "__main__":
    main()
