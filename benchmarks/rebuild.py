"""From a stored module to a verdict: `python benchmarks/rebuild.py [--json FILE]`.

Every ratio is of commands run in turns within this run: CPU time (user + system) of the whole
process, the smallest of the rounds; the machine's other work inflates medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from model_39m import Block
from table import Row, report

import modulelens as ml

HERE = Path(__file__).parent
WIDTH = 768
EMPTY = "pass"
FLOOR = "import torch, sys; [open(p, 'rb').read() for p in sys.argv[1:]]"
CHECK = "import modulelens as ml, sys; c = ml.Repo(sys.argv[1])['block'].check(); assert c, c"
SHOW = "import sys; from modulelens.cli import main; main()"


def child(code: str, *args: str) -> float:
    """CPU seconds of `python -c code args`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *args]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=HERE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def capture(folder: Path) -> ml.Repo:
    torch.manual_seed(0)
    module = Block(WIDTH, 8)
    hidden = torch.randn(2, 64, WIDTH, requires_grad=True)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    with ml.trace(module, name="block", modules="") as trace:
        module(hidden, mask=mask).sum().backward()
    repo = ml.Repo(folder / "repo")
    repo.add(trace)
    return repo


def fresh_process(repo: ml.Repo, rounds: int) -> list[Row]:
    entry = repo["block"]
    blobs = [str(repo.root / "blobs" / d[:2] / d) for d in entry.metadata.blobs]
    floors, checks = [], []
    for _ in range(rounds):
        floors.append(child(FLOOR, *blobs))
        checks.append(child(CHECK, str(repo.root)))
    size = (
        f"{entry.metadata.own_bytes / 1e6:.0f} MB module, {min(checks):.2f} s / {min(floors):.2f} s"
    )
    ratio = min(checks) / min(floors)
    what = "rebuild + run + check in a new process / import torch + read its bytes"
    return [(what, f"{ratio:.2f}x", "<= 1.3x", size)]


def show(entries: int, rounds: int, folder: Path) -> list[Row]:
    import msgspec

    from modulelens.store import LocalStore

    store = LocalStore(folder / "many")
    small = ml.Repo(folder / "repo")["block"]
    for number in range(entries):
        record = msgspec.structs.replace(
            small.metadata, fqn=f"layers.{number}", version=0, blobs={}, source=None
        )
        store.put_entries([(record, {})])
    empties, shows = [], []
    for _ in range(rounds):
        empties.append(child(EMPTY))
        shows.append(
            child(SHOW, "show", f"block/layers.{entries // 2}", "--repo", str(folder / "many"))
        )
    ratio = min(shows) / min(empties)
    return [
        (
            f"`modulelens show`, {entries:,} entries / empty `python -c pass`",
            f"{ratio:.1f}x",
            "<= 12x",
            f"{1e3 * min(shows):.0f} ms / {1e3 * min(empties):.0f} ms CPU",
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--entries", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repo = capture(folder)
        rows = fresh_process(repo, options.rounds)
        rows += show(options.entries, options.rounds, folder)
    report("Rebuild", rows, options.json)


if __name__ == "__main__":
    main()
