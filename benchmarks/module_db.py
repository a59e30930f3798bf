"""All samples of torch's own module tests, traced, stored, rebuilt in a worker and graded.

Prints a table per module and writes JSON. Judges nothing itself: the grades are the repo's.

    python -m benchmarks.module_db [--samples N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.suites.module_db import ASPECTS, Row, cases, named, shares, sweep

import modulelens as ml


def main() -> None:
    """Runs the sweep and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, help="most samples per module and mode; all")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep(ml.Repo(folder), cases(asked.samples))
    took = {"wall_s": time.perf_counter() - started, **cpu_seconds()}
    report = summary(rows) | took | {"torch": torch.__version__}
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    print(table(rows))
    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in took.items())
    print(f"\n{spent}; torch {torch.__version__}")


def cpu_seconds() -> dict[str, float]:
    """CPU time of this process (imports included) and of the worker that graded."""
    kinds = {"cpu_s": resource.RUSAGE_SELF, "worker_cpu_s": resource.RUSAGE_CHILDREN}
    used = {name: resource.getrusage(kind) for name, kind in kinds.items()}
    return {name: use.ru_utime + use.ru_stime for name, use in used.items()}


def summary(rows: list[Row]) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "samples": len({row.case for row in rows}),
        "modules": len(rows),
        "calls": sum(row.calls for row in rows),
        "exact": {aspect: list(counted) for aspect, counted in shares(rows).items()},
        "not_exact": [list(line) for line in named(rows)],
    }


def table(rows: list[Row]) -> str:
    """Markdown: the totals, one line per `ModuleInfo`, and everything that is not exact."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case.rsplit(".", 2)[0], []).append(row)
    columns = ("all", *ASPECTS)
    lines = [
        "| module | samples | modules | exact | outputs | buffers | param_grads |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, members in {"**all**": rows, **groups}.items():
        counted = shares(members)
        cells = [f"{counted[c][0]} / {counted[c][1]}" if counted[c][1] else "" for c in columns]
        samples = len({row.case for row in members})
        lines.append(f"| {name} | {samples} | {len(members)} | {' | '.join(cells)} |")
    reasons = [f"- {cls}: {reason} ({count})" for cls, reason, count in named(rows)]
    return "\n".join([*lines, "", "Not exact, or not graded:", "", *(reasons or ["- none"])])


if __name__ == "__main__":
    main()
