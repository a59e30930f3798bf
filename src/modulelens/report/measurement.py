"""Times of one callable, and of two side by side."""

from __future__ import annotations

from modulelens.records import Comparison, Measurement
from modulelens.report.quantity import duration, plural
from modulelens.report.table import clean, table


def measurement_report(measurement: Measurement) -> str:
    """Median, spread and number of runs of one callable."""
    lines = [_times([measurement]), _setting(measurement)]
    return "\n".join(lines + [f"note: {clean(text)}" for text in measurement.notes])


def comparison_report(comparison: Comparison) -> str:
    """Both callables, the speedup with its interval, and the verdict first."""
    low, high = comparison.interval
    lines = [
        f"{comparison.verdict}: {comparison.speedup:.3g}x the original's speed "
        f"(95 % interval {low:.3g} to {high:.3g})",
        _times([comparison.original, comparison.candidate]),
        _setting(comparison.original),
    ]
    if comparison.correct:
        lines.append(f"correctness: {clean(comparison.correct)}")
    return "\n".join(lines + [f"note: {clean(text)}" for text in comparison.notes])


def _times(measurements: list[Measurement]) -> str:
    header = ("", "MEDIAN", "MIN", "QUARTILES", "95 % OF MEDIAN", "FIRST RUN", "RUNS")
    rows = [
        (
            m.label,
            duration(m.median_s),
            duration(m.min_s),
            f"+-{duration(m.iqr_s / 2)}",
            f"{duration(m.interval_s[0])} to {duration(m.interval_s[1])}",
            duration(m.first_s),
            str(len(m.times_s)),
        )
        for m in measurements
    ]
    return table(header, rows, right=(1, 2, 3, 4, 5, 6))


def _setting(measurement: Measurement) -> str:
    what = "forward + backward" if measurement.backward else "forward"
    inputs = "synthesised inputs" if measurement.synthesized else "captured inputs"
    threads = plural(measurement.num_threads, "thread")
    return f"{what} on {measurement.device}, {threads}, {inputs}, {measurement.warmup} warm-up"
