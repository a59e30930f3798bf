"""Sharded jobs on this machine: what is rebuilt in one process, and what tracing costs them.

python benchmarks/distributed.py            # the table of docs/distributed.md
python benchmarks/distributed.py fsdp tp    # some ways only
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.distributed.launch import launch  # noqa: E402

import modulelens as ml  # noqa: E402

JOB = ROOT / "tests" / "distributed" / "job.py"
WAYS = {
    "ddp": (2, "DDP"),
    "compiled": (2, "DDP, blocks compiled"),
    "fsdp": (2, "FSDP2"),
    "fsdp_kept": (2, "FSDP2, not resharded after forward"),
    "fsdp_mixed": (2, "FSDP2, bfloat16 parameters"),
    "fsdp_again": (2, "FSDP2, activation checkpointing"),
    "tp": (2, "tensor parallel"),
    "grid": (4, "FSDP2 x tensor parallel, 2 x 2"),
}
KINDS = {
    "Linear": "dense",
    "LayerNorm": "dense",
    "Embedding": "embedding",
    "Attention": "attention",
    "MLP": "MLP",
    "Block": "block",
    "Decoder": "model",
}
COLUMNS = ("dense", "embedding", "attention", "MLP", "block", "model")
_ORDER = ("exact", "close", "shape", "no")


def rows_of(repo: ml.Repo) -> dict[bool, dict[str, str]]:
    """By whether parts were merged: the worst grade of each kind of module."""
    entries = repo.find()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repo.verify(entries)
    found: dict[bool, dict[str, list[ml.Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in (repo[e.id] for e in entries):
        kind = KINDS.get(entry.cls.rpartition(":")[2])
        if kind:
            found[bool(entry.metadata.merged)][kind].append(entry)
    return {merged: {k: _worst(v) for k, v in kinds.items()} for merged, kinds in found.items()}


def _worst(entries: Iterable[ml.Entry]) -> str:
    grades = {entry: entry.grade for entry in entries}
    levels = sorted({g.level.value for g in grades.values() if g}, key=_ORDER.index)
    reasons = {g.reason.partition(":")[0] for g in grades.values() if g and g.level.value == "no"}
    errors = [g.max_abs for g in grades.values() if g and g.level.value == "close" and g.max_abs]
    text = ", ".join(levels)
    if reasons:
        text += f" ({', '.join(sorted(reasons))})"
    return f"{text} ({max(errors):.0e})" if errors else text


def main() -> None:
    """Runs each way's job, and prints one line per way and kind of entry."""
    asked = sys.argv[1:] or list(WAYS)
    print(f"| what | bits, collectives | entries | {' | '.join(COLUMNS)} |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for way in asked:
        ranks, name = WAYS[way]
        with tempfile.TemporaryDirectory() as folder:
            launch(ranks, JOB, folder, way)
            runs = [
                json.loads((Path(folder) / f"{way}.{r}.json").read_text()) for r in range(ranks)
            ]
            same = "the same" if all(r["plain"] == r["traced"] for r in runs) else "DIFFER"
            for merged, kinds in sorted(rows_of(ml.Repo(Path(folder) / way)).items()):
                cells = " | ".join(kinds.get(kind, "") for kind in COLUMNS)
                print(f"| {name} | {same} | {'merged' if merged else 'one rank'} | {cells} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
