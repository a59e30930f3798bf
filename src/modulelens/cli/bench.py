"""`modulelens bench`: how fast the module is, or a candidate beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from modulelens.cli.command import CANDIDATE, REF, REPO, Command, Option, Reply
from modulelens.cli.repos import open_entry, with_repo
from modulelens.errors import CheckFailed
from modulelens.records import Comparison, Measurement, to_json
from modulelens.report.measurement import comparison_report, measurement_report


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one callable, in seconds. The raw times go to the file of `--out`."""

    label: str
    median_s: float
    min_s: float
    iqr_s: float
    interval_s: tuple[float, float]
    first_s: float
    runs: int
    backward: bool
    device: str
    num_threads: int
    synthesized: bool
    notes: tuple[str, ...] = ()


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """The original's timing, and with a candidate both, the speedup and the verdict."""

    original: Timing
    candidate: Timing | None = None
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    verdict: str = ""
    correct: str = ""
    notes: tuple[str, ...] = ()
    file: str = ""


def run(
    *,
    ref: str,
    candidate: str | None,
    repo: str | None,
    no_backward: bool,
    budget: float,
    fail_below: float | None,
    out: str | None,
) -> Reply:
    """Measures; fails on a wrong candidate, and below the speedup that the user needs."""
    entry = open_entry(ref, repo)
    measured = entry.benchmark(candidate, backward=not no_backward, budget_s=budget)
    if out:
        Path(out).write_bytes(to_json(measured))
    next_commands = [with_repo(f"profile {ref}", repo)]
    if isinstance(measured, Measurement):
        data = Benchmark(original=_timing(measured), file=out or "")
        return Reply(data, measurement_report(measured), next=next_commands)
    return Reply(
        _benchmark(measured, out or ""),
        comparison_report(measured),
        next=next_commands,
        failure=_failure(measured, candidate or "", fail_below),
    )


def _failure(measured: Comparison, candidate: str, fail_below: float | None) -> CheckFailed | None:
    if measured.correct.startswith(("MISMATCH", "RUNTIME", "TIMEOUT")):
        return CheckFailed(
            f"{measured.correct}: {candidate} does not compute what the original does",
            hint="modulelens check names the leaf",
        )
    if fail_below is not None and measured.speedup < fail_below:
        return CheckFailed(f"speedup {measured.speedup:.3g} is below {fail_below}")
    return None


def _benchmark(comparison: Comparison, file: str) -> Benchmark:
    return Benchmark(
        original=_timing(comparison.original),
        candidate=_timing(comparison.candidate),
        speedup=comparison.speedup,
        interval=comparison.interval,
        verdict=comparison.verdict,
        correct=comparison.correct,
        notes=comparison.notes,
        file=file,
    )


def _timing(measurement: Measurement) -> Timing:
    return Timing(
        label=measurement.label,
        median_s=measurement.median_s,
        min_s=measurement.min_s,
        iqr_s=measurement.iqr_s,
        interval_s=measurement.interval_s,
        first_s=measurement.first_s,
        runs=len(measurement.times_s),
        backward=measurement.backward,
        device=measurement.device,
        num_threads=measurement.num_threads,
        synthesized=measurement.synthesized,
        notes=measurement.notes,
    )


COMMAND = Command(
    run,
    "Benchmark the module, or a candidate beside it.",
    "modulelens bench dlrm/over_arch fused.py:FusedMLP --out times.json",
    Benchmark,
    arguments=(REF, CANDIDATE),
    options=(
        REPO,
        Option("--no-backward", bool, "Time the forward only."),
        Option("--budget", float, "Seconds to spend on timing.", 3.0, metavar="SECONDS"),
        Option("--fail-below", float, "Exit 4 below this speedup.", metavar="RATIO"),
        Option("--out", str, "Write the raw times as JSON.", metavar="FILE"),
    ),
)
