"""Trains each ranking model a few steps on the ranks of a job, and traces one of them.

Started by torch's launcher: `-m tests.distributed.train_ranking REPO [--compare-all] KIND ...`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import ranking
from tests.distributed.counting import collectives
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan

import modulelens as ml

Made = tuple[nn.Module, str, list[Any]]
LARGE = (ranking.LARGE_ROWS, ranking.LARGE_ROWS)
#: What is also trained without a trace, to compare.
UNDISTURBED = ("column_wise", "large", "pipelined_table_wise", "hands_on", "sequences_row_wise")
UNDISTURBED += ("alone",)
#: How the two tables lie.
LIE: dict[str, list[Any]] = {
    "table_wise": [table_wise(rank=0), table_wise(rank=1)],
    "row_wise": [row_wise(), row_wise()],
    "column_wise": [column_wise(ranks=[0, 1, 0, 1]), column_wise(ranks=[0, 1])],
    "data_parallel": [data_parallel(), data_parallel()],
    "table_row_wise": [table_row_wise(host_index=0)] * 2,
    "grid": [grid_shard(host_indexes=[0])] * 2,
}
#: Of sequences TorchRec 1.8 lays parts of one width only, in no grid, and whole ones not on a CPU.
SEQUENCES_LIE = {name: LIE[name] for name in ("table_wise", "row_wise")}
SEQUENCES_LIE["column_wise"] = [column_wise(ranks=[0, 1])] * 2


def _ranking(hows: list[Any], **options: Any) -> Made:
    return ranking.Ranking(ranking.bags(**options)), "ebc", hows


def _pipelined(hows: list[Any]) -> Made:
    return ranking.Pipelined(ranking.bags()), "ebc", hows


def _sequences(hows: list[Any]) -> Made:
    return ranking.Sequences(), "ec", hows


#: kind -> the model, the path of its collection, how each table lies.
KINDS: dict[str, Callable[[], Made]] = {
    **{name: functools.partial(_ranking, hows) for name, hows in LIE.items()},
    **{f"pipelined_{name}": functools.partial(_pipelined, hows) for name, hows in LIE.items()},
    **{f"sequences_{n}": functools.partial(_sequences, hows) for n, hows in SEQUENCES_LIE.items()},
    "swapped": lambda: _ranking([table_wise(rank=1), table_wise(rank=0)]),
    "mixed": lambda: _ranking([row_wise(), table_wise(rank=1)]),
    "mean": lambda: _ranking([row_wise(), row_wise()], mean=True),
    "alone": lambda: _ranking([table_wise(rank=0), row_wise()]),
    "shapes": lambda: _ranking([table_wise(rank=0), row_wise()]),
    "steps": lambda: _ranking([table_wise(rank=0), table_wise(rank=1)], rows=LARGE),
    "weighted": lambda: _ranking([table_wise(rank=0), column_wise(ranks=[0, 1])], weighted=True),
    "large": lambda: _ranking([row_wise(), column_wise(ranks=[0, 1])], rows=LARGE),
    "all_rows": lambda: _ranking([row_wise(), column_wise(ranks=[0, 1])], rows=LARGE),
    "one_sided": lambda: _ranking([row_wise(), row_wise()], rows=LARGE),
    "hands_on": lambda: (
        ranking.HandsOn(ranking.bags()),
        "sparse.ebc",
        [table_wise(rank=0), table_wise(rank=1)],
    ),
    "waits_twice": lambda: (
        ranking.WaitsTwice(ranking.bags()),
        "ebc",
        [data_parallel(), data_parallel()],
    ),
    "unused": lambda: (
        ranking.Unused(ranking.bags()),
        "ebc",
        [table_wise(rank=0), table_wise(rank=1)],
    ),
}


def parallel(made: Made, *, fused: bool) -> DistributedModelParallel:
    """The model over all ranks. What is `fused` changes its weights within backward."""
    model, path, hows = made
    collection: Any = model.get_submodule(path)
    sequences = isinstance(model, ranking.Sequences)
    sharder: Any = EmbeddingCollectionSharder() if sequences else EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        dict(zip(("t1", "t2"), hows, strict=True)),
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    if sequences or fused:  # the dense kernel pools on the CPU what it should not
        for sharding in plan.values():
            sharding.compute_kernel = "fused"
    plans = ShardingPlan(plan={path: plan})
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plans, sharders=[sharder]
    )


def train(kind: str, *, traced: bool) -> tuple[ml.Trace, list[Tensor], list[int]]:
    """Four steps, of which the second is traced; also the third of the kind `steps`.

    Returns:
        The trace, and what came of the training: each step's scores and all weights; how many
        collectives each step began.
    """
    torch.manual_seed(0)
    model = parallel(KINDS[kind](), fused=kind in ("large", "steps"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    rows = ranking.LARGE_ROWS if kind in ("large", "steps") else min(ranking.ROWS)
    batches = [ranking.batch_of(rows, weighted=kind == "weighted") for _ in range(6)]
    stream = iter(batches)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))

    counts: list[int] = []

    def counted() -> Tensor:
        before = collectives()
        found = step()
        counts.append(collectives() - before)
        return found

    def step() -> Tensor:
        if kind.startswith("pipelined"):
            found: Tensor = pipeline.progress(stream)
            return found.detach().clone()
        scores: Tensor = model(next(stream))
        scores.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return scores.detach().clone()

    seen = [counted()]
    weights: Any = "shape" if kind == "shapes" else "full"
    rows_of: Any = "all" if kind == "all_rows" else "touched"
    keep = ml.Keep(grads=True, weights=weights, embedding_rows=rows_of)
    trace = ml.trace(model, name=kind, keep=keep, steps=2 if kind == "steps" else 1)
    with trace if traced else contextlib.nullcontext():
        seen += [counted(), counted()]
    seen += [counted(), *(p.detach().clone() for p in model.parameters())]
    return trace, seen, counts


def main(repo: str, kinds: list[str], compared: Collection[str]) -> None:
    """Stores what each rank traced; nothing is verified here."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
    rank = dist.get_rank()
    for kind in kinds:
        trace, seen, counts = train(kind, traced=kind != "alone" or rank == 0)
        lines = [f"{found.fqn}: {found}" for found in trace.coverage] + trace.warnings
        if kind in compared:
            _, expected, untraced = train(kind, traced=False)
            same = all(map(torch.equal, seen, expected)) and len(seen) == len(expected)
            lines.append(f"as without the trace: {same}")
            lines.append(f"collectives as without it: {counts == untraced}")
            lines.append(f"collectives of each step: {counts}")
        with Path(f"{repo}.{rank}").open("a") as told:
            told.writelines(f"{kind}/{line}\n" for line in lines)
        if trace.captures:
            ml.Repo(repo).add(trace, verify=False)
        dist.barrier()


if __name__ == "__main__":
    where, *asked = sys.argv[1:]
    all_too = "--compare-all" in asked
    asked = [kind for kind in asked if kind in KINDS]
    main(where, asked, asked if all_too else UNDISTURBED)
    sys.stdout.flush()
    os._exit(0)
