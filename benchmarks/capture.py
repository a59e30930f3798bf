"""What capture costs: `python benchmarks/capture.py [--json FILE]`.

Ratios within one run, plain and traced steps interleaved, CPU time of the main thread (and wall
time beside it), median of the rounds. A step is forward, backward and an optimizer's step.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from model_39m import Model, batch
from table import Row, report

import modulelens as ml


def clocks() -> tuple[float, float]:
    return time.thread_time(), time.perf_counter()


def timed(step: Callable[[], object]) -> tuple[float, float]:
    gc.collect()
    cpu, wall = clocks()
    kept = step()  # a trace is held until the clock stopped: freeing it is not the step's work
    spent = clocks()[0] - cpu, clocks()[1] - wall
    del kept
    return spent


class Training:
    """The loop that everything is measured in."""

    def __init__(self, optimizer: bool) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.data = batch()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01) if optimizer else None

    def step(self) -> None:
        self.model(*self.data).loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()

    def traced(self, keep: ml.Keep) -> ml.Trace:
        with ml.trace(self.model, keep=keep) as trace:
            self.step()
        return trace

    def cloning(self) -> None:
        """The cheapest honest script: hooks that clone inputs and outputs, and all parameters."""
        kept: list[torch.Tensor] = []

        def hook(module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            values = (*args, *kwargs.values(), output)
            kept.extend(v.detach().clone() for v in values if isinstance(v, torch.Tensor))
            kept.extend(p.detach().clone() for p in module.parameters(recurse=False))

        handles = [m.register_forward_hook(hook, with_kwargs=True) for m in self.model.modules()]
        self.step()
        for handle in handles:
            handle.remove()


def ratio(training: Training, other: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median over rounds of other / plain: CPU time of this thread, wall time."""
    pairs = []
    for number in range(rounds):
        sides = [(0, training.step), (1, other)]
        found = dict((side, timed(run)) for side, run in (sides if number % 2 else sides[::-1]))
        pairs.append([b / a for a, b in zip(found[0], found[1], strict=True)])
    cpu, wall = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    return cpu, wall


def idle(training: Training, rounds: int) -> float:
    """Step time after traces / before any, in interleaved processes' stead: same model, A then B."""
    fresh = Training(training.optimizer is not None)
    fresh.step()
    pairs = []
    for number in range(rounds):
        sides = [(0, fresh.step), (1, training.step)]
        found = dict((side, timed(run)[0]) for side, run in (sides if number % 2 else sides[::-1]))
        pairs.append(found[1] / found[0])
    return statistics.median(pairs)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for optimizer in (False, True):
        training = Training(optimizer)
        for _ in range(2):
            training.step()
        what = "forward + backward + SGD step" if optimizer else "forward + backward"
        for name, keep in (
            ("all modules, inputs + outputs + weights", ml.Keep()),
            ("the same with gradients", ml.Keep(grads=True)),
            ("shape-only", ml.Keep(tensors="shape", weights="shape")),
        ):
            training.traced(keep)
            cpu, wall = ratio(training, lambda: training.traced(keep), options.rounds)  # noqa: B023
            rows.append(
                (f"traced step, {name}", f"{cpu:.3f}x", "<= 1.05x", f"{what}; wall {wall:.2f}x")
            )
        cpu, wall = ratio(training, training.cloning, options.rounds)
        rows.append(
            ("hooks that clone, for comparison", f"{cpu:.3f}x", "", f"{what}; wall {wall:.2f}x")
        )
        rows.append(
            (
                "step after traces / before (idle)",
                f"{idle(training, options.rounds):.3f}x",
                "1.00x",
                what,
            )
        )
    rows += disk(Training(False))
    report("Capture", rows, options.json)


def disk(training: Training) -> list[Row]:
    before = peak_bytes()
    trace = training.traced(ml.Keep())
    unique = sum(s.high - s.low for s in trace.snapshots.taken if s.high)
    with tempfile.TemporaryDirectory() as folder:
        repo = ml.Repo(Path(folder) / "repo")
        cpu, wall = clocks()
        entries = repo.add(trace, verify=False)
        took = clocks()[1] - wall
        written = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
        data = bytes(1 << 20)
        start = time.perf_counter()
        with (Path(folder) / "plain").open("wb") as file:
            for _ in range(written >> 20):
                file.write(data)
        plain = time.perf_counter() - start
    count = f"{len(trace.captures)} modules, {len(trace.snapshots.taken)} storages, {unique / 1e6:.1f} MB"
    return [
        ("bytes on disk / unique tensor bytes", f"{written / unique:.4f}", "<= 1.01", count),
        (
            "repo.add / plain write of the same bytes",
            f"{plain / took:.2f}x",
            ">= 0.7x",
            f"{took:.2f} s, {len(entries)} entries",
        ),
        ("copied snapshots (the rest shares pages)", str(trace.snapshots.copied), "", ""),
        (
            "peak memory of the process while tracing",
            f"+{(peak_bytes() - before) / 1e6:.0f} MB",
            "",
            "",
        ),
    ]


if __name__ == "__main__":
    main()
