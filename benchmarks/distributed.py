"""Sharded jobs on this machine: what is rebuilt in one process, and what tracing costs them.

python benchmarks/distributed.py                  # the tables of docs/distributed.md
python benchmarks/distributed.py fsdp torchrec    # some ways only
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
    "ddp_micro": (2, "DDP, compiled, `no_sync`, `GradScaler`, autocast"),
    "fsdp_micro": (2, "FSDP2, compiled, checkpoint wrappers, no gradient sync"),
    "flat": (2, "FSDP1, `use_orig_params`"),
    "flat_micro": (2, "FSDP1, flat, bfloat16, checkpoint wrappers, `no_sync`"),
    "tp": (2, "tensor parallel"),
    "grid": (4, "FSDP2 x tensor parallel, 2 x 2"),
}
TORCHREC = "tests.distributed.train_ranking"
#: How tables lie, and with what before it.
LIE = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "grid")
RANKERS = {
    "": ("EmbeddingBagCollection", LIE),
    "pipelined_": ("TrainPipelineSparseDist", LIE),
    "sequences_": ("EmbeddingCollection", ("table_wise", "column_wise", "row_wise")),
}
KINDS = {
    "Linear": "dense",
    "LayerNorm": "dense",
    "Embedding": "embedding",
    "EmbeddingBagCollection": "embedding",
    "EmbeddingCollection": "embedding",
    "Attention": "attention",
    "Sequential": "MLP",
    "MLP": "MLP",
    "Block": "block",
    "Decoder": "model",
    "Ranking": "model",
    "Pipelined": "model",
    "Sequences": "model",
}
COLUMNS = ("dense", "embedding", "attention", "MLP", "block", "model")
RANKER_COLUMNS = ("dense", "MLP", "lookups", "embedding", "model")
_ORDER = ("exact", "close", "shape", "no")


def rows_of(entries: Iterable[ml.Entry]) -> dict[bool, dict[str, str]]:
    """By whether parts were merged: the worst grade of each kind of module."""
    found: dict[bool, dict[str, list[ml.Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        kind = KINDS.get(entry.cls.rpartition(":")[2])
        if "._lookups." in entry.fqn:
            kind = "lookups"
        if kind:
            found[bool(entry.metadata.merged)][kind].append(entry)
    return {merged: {k: _worst(v) for k, v in kinds.items()} for merged, kinds in found.items()}


def graded(repo: ml.Repo) -> list[ml.Entry]:
    """All entries, each replayed."""
    entries = repo.find()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repo.verify(entries)
    return [repo[entry.id] for entry in entries]


def _worst(entries: Iterable[ml.Entry]) -> str:
    grades = {entry: entry.grade for entry in entries}
    levels = sorted({g.level.value for g in grades.values() if g}, key=_ORDER.index)
    reasons = {g.reason.partition(":")[0] for g in grades.values() if g and g.level.value == "no"}
    errors = [g.max_abs for g in grades.values() if g and g.level.value == "close" and g.max_abs]
    text = ", ".join(levels)
    if reasons:
        text += f" ({', '.join(sorted(reasons))})"
    return f"{text} ({max(errors):.0e})" if errors else text


def print_rows(
    name: str, same: bool, entries: Iterable[ml.Entry], columns: tuple[str, ...]
) -> None:
    """A line for what one rank has, and one for what was merged."""
    bits = "the same" if same else "DIFFER"
    for merged, kinds in sorted(rows_of(entries).items()):
        cells = " | ".join(kinds.get(kind, "") for kind in columns)
        print(f"| {name} | {bits} | {'merged' if merged else 'one rank'} | {cells} |", flush=True)


def print_head(columns: tuple[str, ...]) -> None:
    """What the columns are."""
    print(f"| what | bits, collectives | entries | {' | '.join(columns)} |")
    print("|---" * (3 + len(columns)) + "|")


def torchrec() -> None:
    """One job for all ways in which tables lie; a line per way and kind of entry."""
    kinds = {f"{w}{lie}": f"{name}, {lie}" for w, (name, lies) in RANKERS.items() for lie in lies}
    print_head(RANKER_COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repo"
        launch(2, "-m", TORCHREC, path, "--compare-all", *kinds)
        told = [Path(f"{path}.{rank}").read_text().splitlines() for rank in range(2)]
        entries = graded(ml.Repo(path))
        for kind, name in kinds.items():
            same = all(
                f"{kind}/as without the trace: True" in lines
                and f"{kind}/collectives as without it: True" in lines
                for lines in told
            )
            own = [entry for entry in entries if entry.model == kind]
            print_rows(name.replace("_", "-"), same, own, RANKER_COLUMNS)


def main() -> None:
    """Runs each way's job, and prints one line per way and kind of entry."""
    asked = sys.argv[1:] or [*WAYS, "torchrec"]
    if ways := [way for way in asked if way != "torchrec"]:
        print_head(COLUMNS)
    for way in ways:
        ranks, name = WAYS[way]
        with tempfile.TemporaryDirectory() as folder:
            launch(ranks, JOB, folder, way)
            runs = [
                json.loads((Path(folder) / f"{way}.{r}.json").read_text()) for r in range(ranks)
            ]
            same = all(run["plain"] == run["traced"] for run in runs)
            print_rows(name, same, graded(ml.Repo(Path(folder) / way)), COLUMNS)
    if "torchrec" in asked:
        print()
        torchrec()


if __name__ == "__main__":
    main()
