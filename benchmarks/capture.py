"""What capture costs: `python benchmarks/capture.py [--json FILE]`.

Ratios within one run, plain and traced steps interleaved, CPU time of the main thread (and wall
time beside it), median of the rounds. A step is forward, backward and an optimizer's step.
"""

from __future__ import annotations

import argparse
import functools
import gc
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


def turns(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> list[tuple[float, ...]]:
    """CPU and wall times of both, in turns: (first cpu, first wall, second cpu, second wall)."""
    times = []
    for number in range(rounds):
        order = [(0, first), (1, second)]
        found = {side: timed(run) for side, run in (order if number % 2 else order[::-1])}
        times.append((*found[0], *found[1]))
    return times


def ratio(training: Training, other: Callable[[], object], rounds: int) -> tuple[str, str]:
    """Other / plain: CPU time of this thread, and a note with what else was seen."""
    times = turns(training.step, other, rounds)
    cpu = statistics.median(t[2] / t[0] for t in times)
    wall = statistics.median(t[3] / t[1] for t in times)
    least = min(t[2] for t in times) / min(t[0] for t in times)
    return f"{cpu:.3f}x", f"least / least {least:.3f}x; wall {wall:.2f}x"


def idle(training: Training, rounds: int) -> str:
    """A model that was traced before / one that never was."""
    fresh = Training(training.optimizer is not None)
    fresh.step()
    times = turns(fresh.step, training.step, rounds)
    return f"{statistics.median(t[2] / t[0] for t in times):.3f}x"


def peak_bytes(run: Callable[[], object]) -> int:
    """Most memory that the process had while it ran (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    kept = run()
    status = Path("/proc/self/status").read_text()
    del kept
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


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
            traced = functools.partial(training.traced, keep)
            traced()
            cpu, note = ratio(training, traced, options.rounds)
            target = "" if keep.grads else "<= 1.05x"
            rows.append((f"traced step, {name}", cpu, target, f"{what}; {note}"))
        cpu, note = ratio(training, training.cloning, options.rounds)
        rows.append(("hooks that clone, for comparison", cpu, "", f"{what}; {note}"))
        same = idle(training, options.rounds)
        rows.append(("step after traces / never traced (idle)", same, "1.00x", what))
    rows += disk(Training(False))
    report("Capture", rows, options.json)


def disk(training: Training) -> list[Row]:
    """Bytes, bandwidth and memory of one whole capture."""
    training.step()
    extra = -peak_bytes(training.step) + peak_bytes(lambda: training.traced(ml.Keep()))
    trace = training.traced(ml.Keep())
    unique = sum(high - low for low, high in (s.extent for s in trace.snapshots.taken))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        entries = ml.Repo(Path(folder) / "repo").add(trace, verify=False)
        took = time.perf_counter() - start
        written = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
        data = bytes(1 << 20)
        start = time.perf_counter()
        with (Path(folder) / "plain").open("wb") as file:
            for _ in range(written >> 20):
                file.write(data)
        plain = time.perf_counter() - start
    count = f"{len(trace.captures)} modules, {len(trace.snapshots.taken)} storages"
    megabytes = f"{unique / 1e6:.1f} MB unique"
    return [
        (
            "bytes on disk / unique tensor bytes",
            f"{written / unique:.4f}",
            "<= 1.01",
            f"{count}, {megabytes}",
        ),
        (
            "repo.add bandwidth / plain write of the same bytes",
            f"{plain / took:.2f}x",
            ">= 0.7x",
            f"{took:.2f} s and {plain:.2f} s, {len(entries)} entries",
        ),
        (
            "peak memory of a traced step beyond a plain one",
            f"+{extra / 1e6:.0f} MB",
            f"<= +{unique / 1e6 + 64:.0f} MB",
            "unique bytes + 64 MB",
        ),
    ]


if __name__ == "__main__":
    main()
