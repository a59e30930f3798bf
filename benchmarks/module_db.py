"""All samples of torch's own module tests, traced, stored, rebuilt in a worker and graded.

Prints a table per module and writes JSON. Judges nothing itself: the grades are the repo's.

    python -m benchmarks.module_db [--samples N] [--json module-db.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import modulelens as ml
from tests.suites.module_db import ASPECTS, Row, cases, named, shares, sweep


def main() -> None:
    """Runs the sweep and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, help="most samples per module and mode; all")
    parser.add_argument("--json", type=Path, default=Path("module-db.json"))
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    started, started_cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep(ml.Repo(folder), cases(asked.samples))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    report = summary(rows) | {"wall_s": wall_s, "cpu_s": cpu_s, "torch": torch.__version__}
    asked.json.write_text(json.dumps(report, indent=1))
    print(table(rows))
    print(f"\n{wall_s:.0f} s, of which {cpu_s:.0f} s of CPU in this process; torch {torch.__version__}")


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
