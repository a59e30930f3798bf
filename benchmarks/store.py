"""Measures the local store: bytes on disk, bandwidth of a put, search, and opening a large repo.

    python benchmarks/store.py [--json FILE] [--entries N] [--rows N]

Ratios compare runs that alternate in one process on one disk; absolute times are only shown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from modulelens.records import SCHEMA, Environment, Metadata, collection_id
from modulelens.store import LocalStore, Row
from modulelens.store.index import Index
from modulelens.store.layout import open_layout

STORAGES = 250
TOTAL_BYTES = 200_000_000
ROUNDS = 5


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def storages() -> list[memoryview]:
    """About 200 MB in 250 buffers: a few embedding tables and activations, many small weights."""
    rng = np.random.default_rng(0)
    weights = rng.lognormal(0, 2, STORAGES)
    sizes = (weights / weights.sum() * TOTAL_BYTES / 4).astype(int) + 16
    return [memoryview(rng.standard_normal(size, dtype=np.float32)).cast("B") for size in sizes]


def write_plainly(path: Path, buffers: list[memoryview]) -> None:
    with path.open("wb", buffering=0) as file:
        for buffer in buffers:
            while len(buffer):
                buffer = buffer[file.write(buffer) :]


def write_files(folder: Path, buffers: list[memoryview]) -> None:
    folder.mkdir()
    for number, buffer in enumerate(buffers):
        write_plainly(folder / str(number), [buffer])


def bandwidth(folder: Path) -> dict[str, float]:
    """A put of new blobs against a plain write of the same bytes, to one file and to as many."""
    buffers = storages()
    total = sum(buffer.nbytes for buffer in buffers)
    plain, many, put, again = [], [], [], []
    for number in range(ROUNDS):
        file, root = folder / "plain", folder / f"repo{number}"
        plain.append(timed(lambda file=file: write_plainly(file, buffers)))
        file.unlink()
        # Nothing is removed in between: ext4 looks at every inode freed in the last minutes
        # before it gives out one, so that a new file takes 20 times as long.
        many.append(timed(lambda number=number: write_files(folder / f"many{number}", buffers)))
        store = LocalStore(root)
        put.append(timed(lambda store=store: store.put_blobs(buffers)))
        again.append(timed(lambda store=store: store.put_blobs(buffers)))
        digests = store.put_blobs(buffers)
        sizes = {d: b.nbytes for d, b in zip(digests, buffers, strict=True)}
        entry = Metadata(schema=SCHEMA, model="m", fqn="", cls="C", blobs=sizes)
        store.put_entries([(entry, {})])
        store.close()
        used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return {
        "bytes": total,
        "bytes_on_disk_ratio": used / total,
        "plain_write_s": statistics.median(plain),
        "put_s": statistics.median(put),
        "put_again_s": statistics.median(again),
        "plain_write_of_as_many_files_s": statistics.median(many),
        "put_bandwidth_ratio": statistics.median(p / q for p, q in zip(plain, put, strict=True)),
        "put_bandwidth_ratio_as_many_files": statistics.median(
            p / q for p, q in zip(many, put, strict=True)
        ),
    }


def rows(count: int) -> dict[str, dict[int, Row]]:
    """Rows of `count` entries: models of 500 modules, two versions each, as a team collects."""
    rng = random.Random(0)
    classes = [f"shop.layers:Layer{number}" for number in range(150)]
    found: dict[str, dict[int, Row]] = {}
    for number in range(count // 2):
        model, fqn = f"model{number // 500}", f"blocks.{number % 500 // 10}.part{number % 10}"
        collection = collection_id(model, fqn)
        for version in (1, 2):
            shape = f"{2 ** rng.randrange(10)}x{2 ** rng.randrange(10)}"
            dtype = rng.choice(["float32", "bfloat16", "int64"])
            row = Row(
                id=f"{collection}/{version}",
                name=f"{model}/{fqn}",
                model=model,
                fqn=fqn,
                cls=rng.choice(classes),
                version=version,
                date=f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}T12:00:00Z",
                params=int(10 ** rng.uniform(0, 8)),
                bytes=int(10 ** rng.uniform(0, 9)),
                dtypes=(dtype, "float32"),
                shapes=(shape,),
                input_dtype=(dtype,),
                input_shape=(shape,),
                output_shape=(shape,),
                torch="2.13.0",
                tags=("baseline",) if rng.random() < 0.1 else (),
                grade=rng.choice(["exact", "exact", "exact", "close", "no", None]),
                latency_s=rng.random() if rng.random() < 0.3 else None,
            )
            found.setdefault(collection, {})[version] = row
    return found


QUERIES: dict[str, dict] = {
    "all": {},
    "class and size": {"cls": "Layer7", "params": {"$gt": 1e6}},
    "size, broad": {"params": {"$gt": 1000}},
    "size, rare": {"params": {"$gt": 9.99e7}},
    "none matches": {"params": {"$gt": 1e12}},
    "dtype and grade": {"input.dtype": "bfloat16", "grade": {"$ne": "exact"}},
    "class regex": {"cls": {"$regex": "Layer1[0-4]$"}},
    "name regex, rare": {"name": {"$regex": "model77/blocks.3.part"}},
    "shape regex": {"shapes": {"$regex": "^512x"}},
    "tag or latency": {"$or": [{"tags": "baseline"}, {"latency_s": {"$lt": 0.01}}]},
    "one name": {"name": "model42/blocks.17.part3"},
    "date range": {"date": {"$ge": "2026-03-01", "$lt": "2026-03-02"}},
}


def search(folder: Path, count: int) -> dict[str, float]:
    """Time of find with 50 results over many entries, without their files."""
    found = rows(count)
    layout = open_layout(folder / "index")
    for collection in found:
        (layout.entries / collection).mkdir()
    index = Index(layout, lambda collection, _: found[collection], writable=True)
    result = {"rows": count, "rebuild_s": timed(index.rebuild)}
    medians = []
    for name, filter in QUERIES.items():
        times = [timed(lambda f=filter: index.find(f, limit=50)) for _ in range(11)]
        medians.append(statistics.median(times))
        result[f"find, {name}, ms"] = 1e3 * medians[-1]
    counts = [timed(lambda: index.count({"params": {"$gt": 1e6}})) for _ in range(11)]
    result["count, size, ms"] = 1e3 * statistics.median(counts)
    result["find_median_ms"] = 1e3 * statistics.median(medians)
    result["find_worst_ms"] = 1e3 * max(medians)
    index.close()
    return result


OPEN = """
import sys, time
start = time.perf_counter()
from pathlib import Path
from modulelens.store import LocalStore
imported = time.perf_counter()
store = LocalStore(Path(sys.argv[1]))
opened = time.perf_counter()
metadata = store.metadata(store.resolve(sys.argv[2]))
resolved = time.perf_counter()
rows = store.find({"cls": "MLP"}, limit=50)
found = time.perf_counter()
assert metadata.model and rows
assert "torch" not in sys.modules
print(imported - start, opened - imported, resolved - opened, found - resolved)
"""


def opening(folder: Path, count: int) -> dict[str, float]:
    """Time of a new process to open a repo of many entries, read one and search it."""
    store = LocalStore(folder / "many")
    environment = Environment(python="3.11", torch="2.13.0", packages={"torch": "2.13.0"})

    def record(number: int, model: str = "") -> tuple[Metadata, dict]:
        return (
            Metadata(
                schema=SCHEMA,
                model=model or f"model{number // 100}",
                fqn=f"layers.{number % 100}",
                cls="shop:MLP",
                environment=environment,
            ),
            {},
        )

    def fill() -> None:
        for start in range(0, count, 100):
            store.put_entries([record(number) for number in range(start, start + 100)])

    def fill_singly() -> None:
        for number in range(100):
            store.put_entries([record(number, "single")])

    result = {
        "entries": count,
        "put_entries_ms, of 100, each": 1e3 * timed(fill) / count,
        "put_entry_ms": 1e3 * timed(fill_singly) / 100,
    }
    store.close()
    command = [sys.executable, "-c", OPEN, str(store.root), f"model{count // 200}/layers.7"]
    lines = [subprocess.check_output(command, text=True).split() for _ in range(7)]
    for number, name in enumerate(("import", "open", "resolve_and_read", "first_find")):
        result[f"{name}_ms"] = 1e3 * statistics.median(float(line[number]) for line in lines)
    return result


TARGETS = {
    "bytes_on_disk_ratio": ("<=", 1.01),
    "put_bandwidth_ratio": (">=", 0.7),
    "find_median_ms": ("<=", 20.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        results |= bandwidth(Path(name))
        results |= search(Path(name), options.rows)
        results |= opening(Path(name), options.entries)
    for key, value in results.items():
        sign, target = TARGETS.get(key, ("", 0.0))
        met = (value <= target) if sign == "<=" else (value >= target)
        note = f"  target {sign} {target:g}: {'met' if met else 'MISSED'}" if sign else ""
        print(f"{key:32} {value:16,.3f}{note}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
