"""What capture costs: `python benchmarks/capture.py [--no-peers] [--json FILE]`.

Ratios within one run, plain and traced steps in turns, CPU time of the main thread (and wall time
beside it), median of the rounds. A step is forward, backward and an optimizer's step. Other tools
run on the same model where they are installed (`pip install --group peers`), each in a process of
its own, because some leave hooks behind. How it grows: `growth.py`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import peers
import torch
from floor import give_back_pages, seconds, write_blobs, write_one
from loop import in_turns, peak_bytes, unique_bytes
from model_39m import training
from table import Row, report

import modulelens as ml


def steps(optimizer: bool, rounds: int, device: str) -> list[Row]:
    """A traced step / a plain one, and a plain one after traces / one that was never traced."""
    trained = training(optimizer, device)
    what = "forward + backward + SGD step" if optimizer else "forward + backward"
    rows: list[Row] = []
    for name, keep in (
        ("all modules, inputs + outputs + weights", ml.Keep(embedding_rows="all")),
        ("the same with gradients", ml.Keep(embedding_rows="all", grads=True)),
        ("shape-only", ml.Keep(tensors="shape", weights="shape")),
    ):
        pairs = in_turns(trained.step, functools.partial(trained.traced, keep), rounds)
        target = "" if keep.grads else "<= 1.05x"
        rows.append((f"traced step, {name}", f"{pairs.cpu:.3f}x", target, f"{what}; {pairs}"))
    pairs = in_turns(trained.step, trained.cloning, rounds)
    rows.append(("hooks that clone, for comparison", f"{pairs.cpu:.3f}x", "", f"{what}; {pairs}"))
    pairs = in_turns(training(optimizer, device).step, trained.step, rounds)
    rows.append(
        (
            "step after traces / never traced (idle)",
            f"{pairs.cpu:.3f}x",
            "1.00x",
            f"{what}; {pairs}",
        )
    )
    return rows


def disk(rounds: int, device: str) -> list[Row]:
    """Bytes, bandwidth and memory of one whole capture."""
    trained = training(False, device)
    trained.step()
    keep = ml.Keep(embedding_rows="all")
    extra = -peak_bytes(trained.step) + peak_bytes(lambda: trained.traced(keep))
    trace = trained.traced(keep)
    unique = unique_bytes(trace)
    empty = torch.empty(0, dtype=torch.uint8)
    data = [
        empty.new_empty(0).set_(s.data).numpy() for s in trace.snapshots.taken if s.data.nbytes()
    ]
    times: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            top = Path(folder, str(number))
            top.mkdir()
            repo = ml.Repo(top / "repo")
            plain = seconds(functools.partial(write_one, top / "plain", data))
            blobs = seconds(functools.partial(write_blobs, top / "blobs", data))
            times.append((plain, blobs, seconds(lambda repo=repo: repo.add(trace, verify=False))))
            files = [f for f in Path(top, "repo").rglob("*") if f.is_file()]
            written = sum(f.stat().st_size for f in files)
            del repo
            give_back_pages(top)
    # The first round's memory comes from the host.
    plain, blobs, took = zip(*times[1:], strict=True)
    count = f"{len(trace.captures)} modules, {len(trace.snapshots.taken)} storages"
    return [
        (
            "bytes on disk / unique tensor bytes",
            f"{written / unique:.4f}",
            "<= 1.01",
            f"{count}, {unique / 1e6:.1f} MB unique",
        ),
        (
            "repo.add bandwidth / plain write of the same bytes",
            _over(plain, took),
            ">= 0.7x",
            f"median of the ratios; least {min(took):.3f} s and {min(plain):.3f} s",
        ),
        (
            "the floor: the same blobs hashed and written, nothing else / plain write",
            _over(plain, blobs),
            "",
            f"two threads; least {min(blobs):.3f} s",
        ),
        (
            "peak memory of a traced step beyond a plain one",
            f"+{extra / 1e6:.0f} MB",
            f"<= +{unique / 1e6 + 64:.0f} MB",
            "unique bytes + 64 MB",
        ),
    ]


def _over(plain: Sequence[float], took: Sequence[float]) -> str:
    return f"{statistics.median(p / t for p, t in zip(plain, took, strict=True)):.2f}x"


def others() -> list[Row]:
    """The same model under other tools."""
    rows: list[Row] = []
    for name in peers.NAMES:
        command = [sys.executable, "-W", "ignore", peers.__file__, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == peers.NOT_INSTALLED:
            print(f"{name} is not installed: pip install --group peers", file=sys.stderr)
            continue
        if done.returncode:
            print(f"{name} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append((f"{name}, for comparison", f"{found['cpu']:.2f}x", "", found["note"]))
    return rows


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = options.device
    rows = [row for optimizer in (False, True) for row in steps(optimizer, options.rounds, place)]
    rows += disk(options.rounds, place)
    rows += [] if options.no_peers else others()
    report("Capture", rows, options.json)


if __name__ == "__main__":
    main()
