"""What a team's repo costs: `python benchmarks/remote.py [--json FILE] [--only NAME]`.

One capture of the 39 M-parameter model is pushed to an empty remote, searched, pulled into empty
repos. Bytes are those that the remote got and gave, records and its own manifests included. Weights
& Biases is the stand-in server of the tests behind the real SDK; latency is added to every answer
of it. Numbers of a real service differ; ratios of bytes do not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from model_39m import training
from table import Row, report

import modulelens as ml
from modulelens.store.remote import open_remote
from modulelens.store.remote.seam import RECORD

sys.path.insert(0, str(Path(__file__).parents[1]))
LATENCIES_S = (0.0, 0.04)
MODULES = {"leaf": "blocks.0.mlp.up", "block": "blocks.0", "root": ""}


class Meter:
    """What a remote got and gave so far, in bytes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def got(self) -> int:
        """Bytes that were put."""
        folder = Path(self.url.removeprefix("file://"))
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def gave(self, entries: list[ml.Entry], packs: int) -> int:
        """Bytes that were fetched for entries whose packs had so many."""
        remote = open_remote(self.url)
        total = packs
        for entry in entries:
            version = remote.get(entry.metadata.collection)
            with tempfile.TemporaryDirectory() as name:
                remote.fetch(version, Path(name))
                total += sum(path.stat().st_size for path in Path(name).iterdir())
        return total


class ServedMeter(Meter):
    """Counted by the stand-in server."""

    def __init__(self, url: str, server: object) -> None:
        super().__init__(url)
        self.server = server

    def got(self) -> int:
        """Bytes that were put."""
        return self.server.bytes()["put_bytes"]

    def gave(self, entries: list[ml.Entry], packs: int) -> int:  # noqa: ARG002
        """Bytes that were fetched since the last `forget`."""
        return self.server.bytes()["got_bytes"]


@contextmanager
def folder(place: Path, latency_s: float) -> Iterator[Meter]:
    """A folder on this disk; it has no latency."""
    del latency_s
    yield Meter(f"file://{place}/team")


@contextmanager
def wandb(place: Path, latency_s: float) -> Iterator[Meter]:
    """The real SDK against the stand-in server."""
    from tests.wandb_server import serving

    with serving(place, latency_s=latency_s) as server:
        # A registry of its own: what a repo has sent to another one is looked for there.
        yield ServedMeter(f"wandb://{server.entity}/after-{latency_s * 1000:.0f}-ms", server)


def own_bytes(entry: ml.Entry) -> int:
    """The entry's record, small tensors and blobs."""
    folder = entry._store.root / "entries" / entry.id
    files = sum((folder / name).stat().st_size for name in (RECORD, "state.pt"))
    return files + sum(entry.metadata.blobs.values())


def measured(name: str, repo: ml.Repo, meter: Meter, work: Path) -> list[Row]:
    entries = list(repo)
    unique = sum({d: s for e in entries for d, s in e.metadata.blobs.items()}.values())
    unique += sum(own_bytes(e) - sum(e.metadata.blobs.values()) for e in entries)
    begin = time.perf_counter()
    done = repo.push(meter.url)
    push_s = time.perf_counter() - begin
    assert done.sent == len(entries), done
    got = meter.got()
    begin = time.perf_counter()
    assert repo.push(meter.url).sent == 0
    again_s = time.perf_counter() - begin
    begin = time.perf_counter()
    found = len(ml.Repo(meter.url).rows({"params": {"$gt": 1e6}}))
    find_s = time.perf_counter() - begin
    begin = time.perf_counter()
    everything = ml.Repo(work / "all").pull(meter.url)
    pull_s = time.perf_counter() - begin
    assert len(everything) == len(entries)
    rows = [
        (f"{name}: push", f"{len(entries) / push_s:.0f} modules/s", "", f"{unique / 1e6:.0f} MB"),
        (f"{name}: push again", f"{len(entries) / again_s:.0f} modules/s", "", "nothing is sent"),
        (f"{name}: uploaded / unique bytes", f"{got / unique:.3f}", "<= 1.05", ""),
        (f"{name}: find", f"{find_s:.2f} s", "", f"{found} found, remote opened"),
        (f"{name}: pull", f"{len(entries) / pull_s:.0f} modules/s", "", ""),
    ]
    for kind, fqn in MODULES.items():
        (entry,) = [e for e in entries if e.fqn == fqn]
        packs: list[int] = []
        if isinstance(meter, ServedMeter):
            meter.server.forget()
        begin = time.perf_counter()
        pulled = ml.Repo(work / kind).pull(meter.url, entry.name, progress=packs.append)
        spent = time.perf_counter() - begin
        ratio = meter.gave(pulled, sum(packs)) / own_bytes(entry)
        size = f"{own_bytes(entry) / 1e6:.2f} MB in {spent:.2f} s"
        rows.append((f"{name}: {kind}, fetched / own bytes", f"{ratio:.3f}", "<= 1.25", size))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=("folder", "wandb"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    trained = training(False, "cpu")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        with ml.trace(trained.model, name="model") as trace:
            trained.step()
        repo = ml.Repo(Path(name) / "repo")
        repo.add(trace, verify=False)
        for kind, serve in (("folder", folder), ("wandb", wandb)):
            for latency_s in LATENCIES_S if kind == "wandb" else (0.0,):
                if options.only in (None, kind):
                    work = Path(name) / f"{kind}-{latency_s}"
                    work.mkdir()
                    label = kind if kind == "folder" else f"{kind}, {1e3 * latency_s:.0f} ms"
                    with serve(work, latency_s) as meter:
                        rows += measured(label, repo, meter, work)
    report("A team's repo", rows, options.json)


if __name__ == "__main__":
    main()
