"""What tracing one rank costs a job of two: its other steps, its traced steps, and the other rank.

python benchmarks/overhead.py [dmp ddp fsdp] [--rounds N]     # the table of docs/distributed.md

Two jobs of two ranks stand side by side and run in turns, a few steps each: one that is never
traced, and one whose rank 0 traces a step of each turn, from some turn on. The same data, so
steps of the same number are compared. A ratio or delay is one turn's; medians and quartiles of
those. CPU is that of a whole rank, its threads included.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.distributed.counting import collectives  # noqa: E402

import modulelens as ml  # noqa: E402

RANKS, STEPS, TRACED = 2, 8, 4  # the traced step is in the middle of a turn
WARM_UP, BEFORE = 1, 10  # turns: that do not count, that come before the first traced step
TIMEOUT_S = 400
JOBS = ("never", "traced")
#: Rows of each table, and how it lies.
TABLES = {"row_wise": (1_000_000, 500_000), "table_wise": (300_000,) * 2, "data_parallel": (2_000,)}
TABLES["column_wise"] = (100_000,) * 2
WIDTH, BATCH, PER_BAG, DENSE = 32, 2048, 4, 13

Step = Callable[[], object]
Spent = tuple[float, float, int]  # seconds of the wall clock and of the CPU, collectives


def dmp() -> tuple[nn.Module, Step]:
    """A DLRM whose optimizers run within backward (tables) and after it (dense)."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models.dlrm import DLRM

    how: dict[str, Callable[[int], Any]] = {
        "row_wise": lambda _: sharding_plan.row_wise(),
        "table_wise": lambda number: sharding_plan.table_wise(rank=number % RANKS),
        "column_wise": lambda _: sharding_plan.column_wise(ranks=[0, 1]),
        "data_parallel": lambda _: sharding_plan.data_parallel(),
    }
    rows = {f"{kind}_{i}": n for kind, counts in TABLES.items() for i, n in enumerate(counts)}
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=c, embedding_dim=WIDTH, feature_names=[n])
        for n, c in rows.items()
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    sharder: Any = EmbeddingBagCollectionSharder()
    lies = {name: how[name[:-2]](int(name[-1])) for name in rows}
    plan = sharding_plan.construct_module_sharding_plan(
        bags, lies, sharder=sharder, local_size=RANKS, world_size=RANKS, device_type="cpu"
    )
    for name, sharding in plan.items():
        sharding.compute_kernel = "dense" if name.startswith("data") else "fused"
    model = DistributedModelParallel(
        DLRM(bags, DENSE, [512, 256, WIDTH], [512, 256, 1], dense_device=torch.device("cpu")),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def step() -> None:
        lengths = torch.full((len(rows) * BATCH,), PER_BAG)
        values = torch.cat([torch.randint(0, n, (BATCH * PER_BAG,)) for n in rows.values()])
        features = KeyedJaggedTensor([*rows], values, lengths=lengths)
        model(torch.randn(BATCH, DENSE), features).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _decoder(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Step]:
    from tests.distributed.models import Decoder

    model = wrap(Decoder(width=256, layers=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.randint(0, 50, (16, 64))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def ddp() -> tuple[nn.Module, Step]:
    """A decoder of 2 M parameters."""
    return _decoder(nn.parallel.DistributedDataParallel)


def fsdp() -> tuple[nn.Module, Step]:
    """The same decoder."""
    from torch.distributed.fsdp import fully_shard

    def wrap(model: Any) -> nn.Module:
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    return _decoder(wrap)


WAYS = {"dmp": (dmp, "TorchRec, DLRM"), "ddp": (ddp, "DDP, decoder"), "fsdp": (fsdp, "FSDP2")}


def main() -> None:
    """Starts the jobs of each way, and prints what their ranks measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=30, help="turns with a traced step")
    parser.add_argument("--as-job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_job:
        train(*options.as_job, rounds=options.rounds)
    for way in options.ways:
        with tempfile.TemporaryDirectory() as folder:
            found = in_turns(way, options.rounds, Path(folder))
        print(f"\n{WAYS[way][1]}, {options.rounds} traced steps\n")
        print("| what | rank 0, which traces | rank 1 | target |\n|---|---|---|---|")
        for row in rows_of(found):
            print(f"| {' | '.join(row)} |", flush=True)


# The jobs


def in_turns(way: str, rounds: int, folder: Path) -> dict[tuple[str, int], list[list[Spent]]]:
    """What each rank of both jobs measured: per turn, per step."""
    turns = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), __file__, way, "--rounds", str(rounds), "--as-job"]
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as started:
        for job in JOBS:
            words = [*command, job, str(turns.port), str(folder)]
            log = started.enter_context((folder / f"{job}.log").open("w"))
            process = subprocess.Popen(words, env=os.environ | own, stdout=log, stderr=log)
            started.callback(process.kill)
        for number in range(WARM_UP + BEFORE + rounds):
            for job in JOBS if number % 2 else JOBS[::-1]:
                turns.set(f"begin {job} {number}", "")
                turns.wait([f"end {job} {number} {rank}" for rank in range(RANKS)])
    return {
        (job, rank): json.loads((folder / f"{job}.{rank}.json").read_text())[WARM_UP:]
        for job in JOBS
        for rank in range(RANKS)
    }


def train(job: str, port: str, folder: str, *, rounds: int) -> None:
    """One rank: waits for its turns, and notes what each step took."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    ml.track_init()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    turns = dist.TCPStore("127.0.0.1", int(port), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    torch.manual_seed(0)
    model, step = WAYS[sys.argv[1]][0]()
    torch.manual_seed(1 + rank)
    found = []
    last = WARM_UP + BEFORE + rounds - 1
    for number in range(last + 1):
        turns.wait([f"begin {job} {number}"])
        traces = job == "traced" and rank == 0 and number >= WARM_UP + BEFORE
        found.append([timed(model, step, traces and i == TRACED) for i in range(STEPS)])
        if number == last:
            (Path(folder) / f"{job}.{rank}.json").write_text(json.dumps(found))
        turns.set(f"end {job} {number} {rank}", "")
    dist.barrier()
    os._exit(0)


def timed(model: nn.Module, step: Step, traced: bool) -> Spent:
    """One step, with the trace's beginning and end."""
    count, wall, cpu = collectives(), time.perf_counter(), time.process_time()
    with ml.trace(model) if traced else contextlib.nullcontext() as kept:
        step()
    spent = time.perf_counter() - wall, time.process_time() - cpu, collectives() - count
    del kept  # freeing it is the next step's time, where the loop holds it no longer
    return spent


# The table

Row = tuple[str, str, str, str]
Found = dict[tuple[str, int], list[list[Spent]]]
OTHERS = [i for i in range(STEPS) if i != TRACED]


def rows_of(found: Found) -> Iterator[Row]:
    """Each row of the table."""
    ranks = range(RANKS)
    for what, turns in (("before", slice(None, BEFORE)), ("after", slice(BEFORE, None))):
        for clock, name in enumerate(("wall", "CPU")):
            cells = [spread(ratios(found, rank, turns, OTHERS, clock), "x") for rank in ranks]
            yield (f"untraced steps {what} a traced one / never traced, {name}", *cells, "1.00x")
    after = slice(BEFORE, None)
    for clock, name in enumerate(("wall", "CPU")):
        cells = [spread(ratios(found, rank, after, [TRACED], clock), "x") for rank in ranks]
        yield (f"the traced step / the same step never traced, {name}", *cells, "")
    plain = [[turn[TRACED][0] for turn in found["never", rank][after]] for rank in ranks]
    yield ("that step never traced, ms", *(spread((1e3 * s for s in p), "") for p in plain), "")
    late = [delays(found, rank) for rank in ranks]
    yield ("the traced step is later by, ms", *(spread(each, "") for each in late), "")
    yield (
        "the first one of all (imports, sources) is later by, ms",
        *(f"{e[0]:.1f}" for e in late),
        "",
    )
    more = spread((theirs - own for own, theirs in zip(*late, strict=True)), "")
    yield ("rank 1's delay beyond rank 0's, ms", "", more, "<= 0")
    counts = [counted(found, rank) for rank in ranks]
    yield ("collectives of a step: never traced, untraced, traced", *counts, "the same")


def ratios(found: Found, rank: int, turns: slice, steps: list[int], clock: int) -> Iterator[float]:
    """Per turn: the median of these steps of the traced job / that of the other one."""
    pairs = zip(found["traced", rank][turns], found["never", rank][turns], strict=True)
    for ours, theirs in pairs:
        yield median(ours, steps, clock) / median(theirs, steps, clock)


def median(turn: list[Spent], steps: list[int], clock: int) -> float:
    """Of these steps."""
    return statistics.median(turn[i][clock] for i in steps)


def delays(found: Found, rank: int) -> list[float]:
    """Per turn: milliseconds that the traced step took more than untraced ones around it did."""
    turns = found["traced", rank][BEFORE:]
    return [1e3 * (turn[TRACED][0] - median(turn, OTHERS, 0)) for turn in turns]


def counted(found: Found, rank: int) -> str:
    """The number of collectives of each kind of step; all numbers that there are."""
    never = {step[2] for turn in found["never", rank] for step in turn}
    untraced = {turn[i][2] for turn in found["traced", rank] for i in OTHERS}
    traced = {turn[TRACED][2] for turn in found["traced", rank][BEFORE:]}
    return ", ".join("/".join(map(str, sorted(each))) for each in (never, untraced, traced))


def spread(values: Iterable[float], unit: str) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    digits = 2 if unit else 1
    return f"{middle:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
