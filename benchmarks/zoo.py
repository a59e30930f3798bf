"""A zoo of real models, tiny and random: a step of each is traced, stored, rebuilt and graded.

    python benchmarks/zoo.py [NAME ...] [--modes train,eval,...] [--json FILE] [--list]
    python benchmarks/zoo.py --read FILE ...    tables of what earlier runs wrote, runs nothing

Every module of every model is rebuilt alone in a worker process and replayed; the grades are the
repo's. Exit code 1: tracing changed a bit of a step, or something is not exact without a cause.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tests.models.harness import Report, build, observe, run_step
from tests.models.zoo.architecture import Architecture
from tests.models.zoo.modes import MODES, left_out
from tests.models.zoo.registry import named, zoo
from zoo_table import Absence, Row, absences, problems, reasons, row, tables

import modulelens as ml

Found = tuple[Architecture, str, Report]


def main() -> int:
    """Runs what was asked for, and prints what was found."""
    asked = arguments()
    if asked.read:
        return told([json.loads(file.read_text()) for file in asked.read])
    architectures, missing = zoo()
    for file, why in missing.items():
        print(f"left out {file}: {why}", file=sys.stderr)
    if asked.list:
        print("\n".join(f"{one.family:16} {one.name}" for one in architectures))
        return 0
    chosen = named(asked.names, architectures) if asked.names else architectures
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the libraries, about their own futures
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    for found in run(chosen, asked.modes.split(",")):
        if asked.json:  # after each family: an interrupted run leaves what it found
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return told([found])


def told(runs: list[dict[str, Any]]) -> int:
    """Prints what runs found, all together; the exit code."""
    # Of a model and mode that two runs did, the later one counts.
    rows = [*{(row["model"], row["mode"]): row for run in runs for row in run["rows"]}.values()]
    absent = [tuple(one) for run in runs for one in run["absent"]]
    print(tables(rows))
    print(f"\nNot exact, or not comparable:\n\n{reasons(rows)}")
    print(f"\nNot run:\n\n{absences(absent)}")
    wall_s = " + ".join(f"{run['wall_s']:.0f}" for run in runs)
    print(f"\n{wall_s} s of wall time; torch {torch.__version__}")
    wrong = problems(rows)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all")
    parser.add_argument("--modes", default=",".join(MODES), help="%(default)s")
    parser.add_argument("--json", type=Path, help="write a row per model and mode there")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="print these instead")
    parser.add_argument("--list", action="store_true", help="name the architectures, and end")
    asked = parser.parse_args()
    unknown = set(asked.modes.split(",")) - set(MODES)
    if unknown:
        parser.error(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    return asked


def run(chosen: list[Architecture], modes: list[str]) -> Iterator[dict[str, Any]]:
    """Traces one family while a worker grades the modules of the one before; all that is known.

    All that runs a model is in this thread: torch's random streams and its compiler are the
    process's.
    """
    start = time.perf_counter()
    rows: list[Row] = []
    absent: list[Absence] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as background:
        repo = ml.Repo(Path(folder) / "repo")
        waiting: list[Future[list[Row]]] = []
        families = list(dict.fromkeys(one.family for one in chosen))
        for family in families:
            members = [one for one in chosen if one.family == family]
            found = list(traced(members, modes, repo, absent))
            waiting.append(background.submit(graded, found, repo))
            while waiting and (waiting[0].done() or family == families[-1]):
                rows += waiting.pop(0).result()
                wall_s = time.perf_counter() - start
                yield {"rows": rows, "absent": absent, "wall_s": wall_s}


def traced(
    members: list[Architecture], modes: list[str], repo: ml.Repo, absent: list[Absence]
) -> Iterator[Found]:
    """Plain and traced steps of each model in each mode that it knows."""
    for architecture in members:
        for mode in modes:
            why = left_out(mode, architecture)
            if not why:
                case = MODES[mode](architecture)
                try:
                    first = run_step(case, build(case))
                except Exception as error:  # noqa: BLE001 - boundary: a library's model
                    why = f"its plain step raises {type(error).__name__}: {error}".split("\n")[0]
            if why:
                absent.append((architecture.name, mode, why))
                continue
            with ml.track_init():
                report = observe(case, repo, first=first, verify=False)
            progress(f"{case.name}: {len(report.entries)} modules, {report.traced_s:.2f} s")
            yield architecture, mode, report
        torch.compiler.reset()  # compiled code of models that are gone


def graded(found: list[Found], repo: ml.Repo) -> list[Row]:
    """Rows of one family, whose modules one worker process rebuilds."""
    entries = [entry for *_, report in found for entry in report.entries]
    start = time.perf_counter()
    repo.verify(entries)
    each_s = (time.perf_counter() - start) / max(len(entries), 1)
    family = found[0][0].family if found else ""
    progress(f"{family}: {len(entries)} modules graded, {each_s * 1e3:.0f} ms each")
    return [row(*one, verify_s=each_s * len(one[2].entries)) for one in found]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
