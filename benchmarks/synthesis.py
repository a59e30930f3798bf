"""Made-up inputs and weights: does every module of the zoo run on them, and as fast as on its own?

    python benchmarks/synthesis.py [NAME ...] [--json FILE] [--skip-zoo] [--skip-times]

Each time is compared in turns with that on the captured values, and that again with itself: the
second ratio is the noise. Exit code 1: a module of the zoo does not run.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from model_39m import Block
from table import Row, report
from tests.models.harness import build, run_step
from tests.models.zoo.modes import MODES, left_out
from tests.models.zoo.registry import named, zoo
from torch import Tensor, nn

import modulelens as ml
from modulelens.errors import NotRebuildable
from modulelens.measure.benchmark import RunTrial, compare_speed, trial_of
from modulelens.records import Comparison

SHAPES = ml.Keep(tensors="shape", weights="shape", grads=True)
FULL = ml.Keep(grads=True)
BUDGET_S = 4.0


class Ranker(nn.Module):
    """Skewed ids into a table that no cache holds: which rows are looked up sets the speed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(1_000_000, 64, mode="sum", sparse=True)
        self.over = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        offsets = lengths.cumsum(0) - lengths
        return self.over(self.table(ids, offsets))


def skewed() -> tuple[Tensor, Tensor]:
    """Ids of which few are frequent, and the lengths of 2,048 bags."""
    lengths = torch.randint(1, 40, (2048,))
    return (torch.rand(int(lengths.sum())).pow(6) * 1_000_000).long(), lengths


TIMED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "transformer block": (
        lambda: Block(512, 8),
        lambda m: m(
            torch.randn(4, 128, 512, requires_grad=True),
            mask=torch.ones(128, 128, dtype=torch.bool).tril(),
        ),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        lambda m: m(torch.randn(8, 3, 96, 96)),
    ),
    "ranker": (Ranker, lambda m: m(*skewed())),
    "lstm": (
        lambda: nn.LSTM(128, 128, 2, batch_first=True),
        lambda m: m(torch.randn(16, 40, 128))[0],
    ),
    "sparse activations": (
        lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)),
        lambda m: m(torch.randn(256, 1024).relu()),
    ),
}


def main() -> int:
    """Runs what was asked for, and prints what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures of the zoo; all")
    parser.add_argument("--json", help="write the rows there")
    parser.add_argument("--skip-zoo", action="store_true")
    parser.add_argument("--skip-times", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the libraries, about their own futures
    logging.disable(logging.WARNING)
    rows = [] if asked.skip_times else times()
    broken: dict[str, str] = {}
    if not asked.skip_zoo:
        modules, broken = every_module(asked.names)
        share = f"{modules - len(broken):,} of {modules:,}"
        rows.append(("modules of the zoo that run on stand-ins", share, "all", "with backward"))
    report("Synthesised inputs and weights", rows, asked.json)
    return 1 if broken else 0


def entries(model: nn.Module, step: Callable[[], object], keep: ml.Keep) -> list[ml.Entry]:
    """The entries of one step, in a folder that is gone when the process ends."""
    folder = tempfile.mkdtemp(dir=_FOLDER.name)
    with ml.trace(model, name="m", keep=keep) as trace:
        step()
    return ml.Repo(folder).add(trace, verify=False)


_FOLDER = tempfile.TemporaryDirectory()


def times() -> list[Row]:
    """A row per module: the time on captured values over that on stand-ins."""
    rows: list[Row] = []
    for name, (make, forward) in TIMED.items():
        torch.manual_seed(0)
        model, draw = make(), torch.get_rng_state()

        def step(model: nn.Module = model, forward: Callable[..., Tensor] = forward) -> None:
            torch.manual_seed(1)
            model.zero_grad()
            forward(model).square().mean().backward()

        torch.set_rng_state(draw)
        own, other = (entries(model, step, keep)[0] for keep in (FULL, SHAPES))
        compared, noise = against(own, other), against(own, own)
        what = f"{name}: captured / synthesised"
        wide = f"itself: {noise.speedup:.3f} [{noise.interval[0]:.3f}, {noise.interval[1]:.3f}]"
        low, high = compared.interval
        rows.append((what, f"{compared.speedup:.3f} [{low:.3f}, {high:.3f}]", "1, in noise", wide))
    return rows


def against(left: ml.Entry, right: ml.Entry) -> Comparison:
    """Forward and backward of both, in turns."""
    return compare_speed(trial(left), trial(right), budget_s=BUDGET_S)


def trial(entry: ml.Entry) -> RunTrial:
    """The entry's first call with its backward."""
    ready = entry._replay().ready()
    with ready.run:
        output = ready.run.forward()
    ready.run.grad_output = entry._replay().seeds(0, output)
    return trial_of(ready.run, backward=True)


def every_module(names: Iterable[str]) -> tuple[int, dict[str, str]]:
    """Runs every module of the zoo's training steps on stand-ins; how many, and those that fail."""
    architectures, missing = zoo()
    for file, why in missing.items():
        print(f"left out {file}: {why}", file=sys.stderr)
    modules, broken = 0, {}
    for one in named(names, architectures) if names else architectures:
        case = MODES["eval" if left_out("train", one) else "train"](one)
        with ml.track_init():
            model = build(case)
        run_step(case, model)  # lazy modules learn their shapes
        for entry in entries(model, functools.partial(run_step, case, model), SHAPES):
            modules += 1
            why = failure(entry)
            if why:
                print(f"{one.name}/{entry.fqn}: {why}", file=sys.stderr, flush=True)
                broken[f"{one.name}/{entry.fqn}"] = why
        print(f"{one.name}: {modules} modules so far", file=sys.stderr, flush=True)
    return modules, broken


def failure(entry: ml.Entry) -> str:
    """Why the entry does not run on stand-ins, forward and backward; empty where it does."""
    try:
        ready = entry._replay().ready()
    except NotRebuildable as error:
        return f"{error.reason}: {error.message}"
    run = ready.run
    try:
        with run:
            output = run.forward()
            run.grad_output = entry._replay().seeds(0, output)
            run.backward(output)
    except Exception as error:  # noqa: BLE001 - boundary: the zoo's code
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
