"""Does a push slow training down? `python benchmarks/beside.py [--json FILE] [--rounds N]`.

A capture of the 39 M-parameter model is pushed by the process in the background while the same
model goes on training; steps before the push and beside it, in turns, within one run. What the
worker used is what the system says of it when it has ended. The stand-in server of W&B, which would
be elsewhere, runs at the lowest priority here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from model_39m import training
from table import Row, report

import modulelens as ml
from modulelens.store.remote.background import start
from remote import ServedMeter, folder, wandb

BEFORE = 12


def timed(step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def beside(kind: str, serve, rounds: int) -> list[Row]:
    trained = training(True, "cpu")
    ratios, worker_s, lives, written = [], [], [], []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as name, serve(Path(name), 0.0) as meter:
            if isinstance(meter, ServedMeter):
                os.setpriority(os.PRIO_PROCESS, meter.server.process.pid, 19)
            repo = ml.Repo(Path(name) / "repo")
            with ml.trace(trained.model, name=f"model{number}") as trace:
                trained.step()
            repo.add(trace, verify=False)
            before = [timed(trained.step) for _ in range(BEFORE)]
            begin, during = time.perf_counter(), []
            worker = start(repo._store, meter.url, [entry.metadata for entry in repo])
            while not (ended := os.wait4(worker, os.WNOHANG))[0]:
                during.append(timed(trained.step))
            used = ended[2]
            assert ended[1] == 0, (Path(name) / "repo/outbox.log").read_text()
            ratios.append(statistics.median(during) / statistics.median(before))
            lives.append(time.perf_counter() - begin)
            worker_s.append(used.ru_utime + used.ru_stime)
            written.append(512 * used.ru_oublock)
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    cores = statistics.median(s / life for s, life in zip(worker_s, lives, strict=True))
    note = f"{low:.2f}x to {high:.2f}x in {rounds} rounds, {os.cpu_count()} cores"
    life = f"lives {statistics.median(lives):.1f} s, lowest priority"
    return [
        (f"{kind}: step beside a push / before it, wall", f"{middle:.2f}x", "1.00x", note),
        (f"{kind}: processor time of the worker", f"{cores:.2f} cores", "<= 1", life),
        (f"{kind}: written by it", f"{statistics.median(written) / 1e6:.0f} MB", "", "per capture"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = beside("folder", folder, options.rounds)
    rows += beside("wandb", wandb, options.rounds)
    report("Training beside a push", rows, options.json)


if __name__ == "__main__":
    main()
