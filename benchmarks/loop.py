"""One training loop, plain and traced in turns, and what a step of it cost. Prints nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import modulelens as ml

Step = Callable[[], object]


@dataclasses.dataclass
class Loop:
    """A model, its batch, and perhaps an optimizer: the loop that everything is measured in.

    Args:
        model: Called with `*data`.
        data: One batch.
        loss: What the model returns -> the loss.
        optimizer: Steps at the end of each step; None: gradients are only set to None.
    """

    model: nn.Module
    data: tuple[Any, ...]
    loss: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None

    def forward(self) -> object:
        """The forward alone."""
        return self.model(*self.data)

    def step(self) -> None:
        """Forward, backward, and the optimizer's step."""
        self.loss(self.model(*self.data)).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()

    def traced(self, keep: ml.Keep) -> ml.Trace:
        """A step under a trace."""
        with ml.trace(self.model, keep=keep) as trace:
            self.step()
        return trace

    def cloning(self) -> None:
        """The cheapest honest script: hooks that clone inputs and outputs, and all parameters."""
        kept: list[Tensor] = []

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            values = (*args, *kwargs.values(), output)
            kept.extend(v.detach().clone() for v in values if isinstance(v, Tensor))
            kept.extend(p.detach().clone() for p in module.parameters(recurse=False))

        handles = [m.register_forward_hook(hook, with_kwargs=True) for m in self.model.modules()]
        self.step()
        for handle in handles:
            handle.remove()


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds: CPU time of this thread, and of the wall clock."""

    cpu_s: float
    wall_s: float


def timed(step: Step) -> Spent:
    """One run."""
    gc.collect()
    cpu, wall = time.thread_time(), time.perf_counter()
    kept = step()  # a trace is held until the clock stopped: freeing it is not the step's work
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    spent = Spent(time.thread_time() - cpu, time.perf_counter() - wall)
    del kept
    return spent


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Runs of two ways to do a step, in turns: `other` is compared with `plain`."""

    plain: list[Spent]
    other: list[Spent]

    @property
    def cpu(self) -> float:
        """Median over the pairs of the ratio of CPU times of the main thread."""
        return statistics.median(
            o.cpu_s / p.cpu_s for p, o in zip(self.plain, self.other, strict=True)
        )

    @property
    def wall(self) -> float:
        """The same by the wall clock."""
        return statistics.median(
            o.wall_s / p.wall_s for p, o in zip(self.plain, self.other, strict=True)
        )

    @property
    def least(self) -> float:
        """The least CPU time of one / the least of the other: what noise adds is left out."""
        return min(o.cpu_s for o in self.other) / min(p.cpu_s for p in self.plain)

    @property
    def extra_s(self) -> float:
        """Median over the pairs of the CPU time that the other took more."""
        return statistics.median(
            o.cpu_s - p.cpu_s for p, o in zip(self.plain, self.other, strict=True)
        )

    def __str__(self) -> str:
        return f"least / least {self.least:.3f}x; wall {self.wall:.2f}x"


def in_turns(plain: Step, other: Step, rounds: int) -> Pairs:
    """Both, `rounds` times each, after a first run of each that does not count."""
    plain()
    other()
    found: tuple[list[Spent], list[Spent]] = ([], [])
    for number in range(rounds):
        order = [(0, plain), (1, other)]
        for side, run in order if number % 2 else order[::-1]:
            found[side].append(timed(run))
    return Pairs(*found)


def peak_bytes(run: Step) -> int:
    """Most memory that the process had while it ran, and after it (Linux)."""
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    kept = run()
    status = Path("/proc/self/status").read_text()
    del kept
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def unique_bytes(trace: ml.Trace) -> int:
    """Bytes of all storages that the trace met, each counted once."""
    return sum(high - low for low, high in (s.extent for s in trace.snapshots.taken))
