"""How the cost of a capture grows: `python benchmarks/growth.py [--json FILE] [--plot FILE.svg]`.

A chain of residual blocks with 10 to 5,000 modules, then one of 100 modules with larger and larger
batches. All modules are traced with inputs, outputs and weights. CPU time of the main thread,
median of the rounds; `--plot` needs matplotlib (`pip install --group peers`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from loop import Loop, in_turns, peak_bytes, unique_bytes
from torch import Tensor, nn

import modulelens as ml

WIDTH, BATCH = 256, 256
MODULES = (10, 100, 1_000, 5_000)
BATCHES = (16, 64, 256, 1_024, 4_096)


class Block(nn.Module):
    """`x + act(linear(norm(x)))`: four modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(self.norm(x)))


@dataclasses.dataclass(frozen=True)
class Point:
    """One size. Times in seconds of the main thread's CPU; `traced` and `shapes` as ratios."""

    modules: int
    batch: int
    step_s: float
    traced: float
    shapes: float
    idle: float
    per_call_s: float
    unique_mb: float
    beyond_unique_mb: float
    add_s: float


def chain(modules: int, batch: int) -> Loop:
    """A chain of about that many modules, SGD included."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(max(1, (modules - 1) // 4))))
    data = (torch.randn(batch, WIDTH),)
    return Loop(model, data, lambda out: out.sum(), torch.optim.SGD(model.parameters(), lr=1e-4))


def measure(modules: int, batch: int, rounds: int) -> Point:
    """All numbers of one size."""
    loop, untraced = chain(modules, batch), chain(modules, batch)
    count = len(list(loop.model.modules()))
    shapes_only = ml.Keep(tensors="shape", weights="shape")
    traced = in_turns(loop.step, functools.partial(loop.traced, ml.Keep()), rounds)
    shapes = in_turns(loop.step, functools.partial(loop.traced, shapes_only), rounds)
    idle = in_turns(untraced.step, loop.step, rounds)
    plain_peak = peak_bytes(loop.step)
    extra = peak_bytes(lambda: loop.traced(ml.Keep())) - plain_peak
    trace = loop.traced(ml.Keep())
    unique = unique_bytes(trace)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        ml.Repo(folder).add(trace, verify=False)
        add_s = time.perf_counter() - start
    return Point(
        modules=count,
        batch=batch,
        step_s=min(spent.cpu_s for spent in traced.plain),
        traced=traced.cpu,
        shapes=shapes.cpu,
        idle=idle.cpu,
        per_call_s=traced.extra_s / count,
        unique_mb=unique / 1e6,
        beyond_unique_mb=(extra - unique) / 1e6,
        add_s=add_s,
    )


def table(title: str, points: list[Point]) -> None:
    """Prints the points."""
    print(f"\n{title} ({torch.__version__}, {torch.get_num_threads()} thread)\n")
    print(
        "| modules | batch | plain step | traced | shape-only | idle | per call | unique bytes "
        "| peak beyond them | repo.add |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for p in points:
        print(
            f"| {p.modules:,} | {p.batch:,} | {p.step_s * 1e3:,.1f} ms | {p.traced:.3f}x "
            f"| {p.shapes:.3f}x | {p.idle:.3f}x | {p.per_call_s * 1e6:,.0f} us "
            f"| {p.unique_mb:,.0f} MB | {p.beyond_unique_mb:+,.0f} MB | {p.add_s:.2f} s |"
        )


def plot(sizes: list[Point], batches: list[Point], file: Path) -> None:
    """Two panels: the traced step's ratio over the number of modules, and over the batch."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        sys.exit("--plot needs matplotlib: pip install --group peers")
    mpl.use("svg")
    # The same picture for the same numbers: no dates, no random ids.
    mpl.rcParams["svg.hashsalt"] = "modulelens"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    panels: list[tuple[Any, list[Point], str]] = [
        (axes[0], sizes, "modules"),
        (axes[1], batches, "batch"),
    ]
    for axis, points, by in panels:
        across = [getattr(p, by) for p in points]
        axis.plot(across, [p.traced for p in points], "o-", label="inputs + outputs + weights")
        axis.plot(across, [p.shapes for p in points], "s-", label="shape-only")
        axis.plot(across, [p.idle for p in points], "^-", label="idle, after the trace")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel(f"{by} (log)")
        axis.set_ylim(bottom=0.9)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("step / plain step, main thread CPU")
    axes[0].set_title(f"batch {BATCH}, width {WIDTH}")
    axes[1].set_title(f"{batches[0].modules} modules, width {WIDTH}")
    axes[0].legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Measures, prints two tables, and draws them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--modules", type=int, nargs="*", default=list(MODULES))
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, batches = [], []
    for modules in options.modules:
        print(f"{modules} modules ...", file=sys.stderr)
        rounds = options.rounds if modules <= 1_000 else max(3, options.rounds // 2)
        sizes.append(measure(modules, BATCH, rounds))
    for batch in options.batches:
        print(f"batch {batch} ...", file=sys.stderr)
        batches.append(measure(100, batch, options.rounds))
    table("Growth with the number of modules", sizes)
    table("Growth with the batch", batches)
    if options.json:
        data = {
            "modules": [*map(dataclasses.asdict, sizes)],
            "batch": [*map(dataclasses.asdict, batches)],
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n")
    if options.plot:
        plot(sizes, batches, options.plot)


if __name__ == "__main__":
    main()
