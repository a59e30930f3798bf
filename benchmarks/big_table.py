"""A table of 10 million rows over two ranks: what a trace of one step keeps, and what it costs.

`python benchmarks/big_table.py [--rows N] [--json FILE]` starts both ranks, on the CPU. The rows
are spread over them, and the optimizer runs within backward: a copy would show in the memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from table import report

import modulelens as ml
from modulelens.records import tensor_refs

WIDTH, BATCH, PER_BAG = 64, 4096, 10


def main() -> None:
    """Starts the ranks, then reads what they stored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--json")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(options.rows, Path(options.rank_of))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
        command += ["--standalone", "--nproc-per-node", "2", __file__]
        command += ["--rows", str(options.rows), "--rank-of", folder]
        threads = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, env=os.environ | threads, check=True, timeout=400, capture_output=True
        )
        told = json.loads((Path(folder) / "told.json").read_text())
        rows = [*_payload(ml.Repo(Path(folder) / "repo")), *_costs(told, options.rows)]
    report(f"a table of {options.rows:,} x {WIDTH} over 2 ranks", rows, options.json)


def train(rows: int, folder: Path) -> None:
    """One rank: some steps, of which one is traced."""
    import torch
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=WIDTH, feature_names=["f"]
    )
    bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        bags, {"t": row_wise()}, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    plan["t"].compute_kernel = "fused"
    model = DistributedModelParallel(
        torch.nn.Sequential(bags),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"0": plan}),
        sharders=[sharder],
    )
    torch.manual_seed(dist.get_rank())

    def step() -> float:
        lengths = torch.full((BATCH,), PER_BAG)
        values = torch.randint(0, rows, (BATCH * PER_BAG,))
        dist.barrier()
        start = time.process_time()
        model(KeyedJaggedTensor(["f"], values, lengths=lengths)).values().mean().backward()
        return time.process_time() - start

    plain = min(step() for _ in range(5))
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    with ml.trace(model, name="big") as trace:
        traced = step()
    step()
    after = _memory("VmHWM")
    ml.Repo(folder / "repo").add(trace, verify=False)
    stored = _memory("VmHWM")
    dist.barrier()
    if dist.get_rank() == 0:
        told = {"plain": plain, "traced": traced, "step": after - before, "add": stored - before}
        (folder / "told.json").write_text(json.dumps(told | {"rss": before}))
    dist.barrier()
    os._exit(0)


def _memory(kind: str) -> int:
    """Resident bytes now ("VmRSS"), or the most since the peak was reset ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


def _payload(repo: ml.Repo) -> list[tuple[str, str, str, str]]:
    """What the ranks' entries take, against the rows, inputs and outputs that they are of."""
    parts = [entry.metadata for entry in repo if not entry.metadata.merged]
    blobs = {digest: size for part in parts for digest, size in part.blobs.items()}
    shown: dict[Any, int] = {}
    for entry in repo:
        replay = entry._replay()
        nodes = replay.payload.nodes(entry.metadata.node)
        values: list[Any] = [[c.args, c.kwargs, c.output] for c in entry.metadata.calls]
        values += [[*node.parameters.values()] for node in nodes]
        for ref in [*tensor_refs(values), *tensor_refs(values, "$parameter")]:
            if entry.metadata.merged or not ref.kept:
                continue
            key = ref.blob or (entry.id, ref.key)
            shown[key] = ref.nbytes if ref.rows is None else ref.rows * WIDTH * 4
    folders = [repo.root / "entries" / part.id for part in parts]
    files = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    kept, wanted = sum(blobs.values()) + files, sum(shown.values())
    note = f"{kept:,} bytes for {wanted:,}"
    return [("bytes / (touched rows + inputs + outputs)", f"{kept / wanted:.3f}", "1.05", note)]


def _costs(told: dict[str, float], rows: int) -> list[tuple[str, str, str, str]]:
    table = rows // 2 * WIDTH * 4
    mib = 1 << 20
    return [
        (
            "peak memory of the traced step / this rank's part of the table",
            f"{told['step'] / table:.3f}",
            "0.10",
            f"{told['step'] / mib:,.0f} MiB more, of {told['rss'] / mib:,.0f}",
        ),
        ("the same with repo.add", f"{told['add'] / table:.3f}", "", ""),
        (
            "traced step / plain step, CPU time",
            f"{told['traced'] / told['plain']:.2f}",
            "",
            f"{told['plain']:.3f} s",
        ),
    ]


if __name__ == "__main__":
    main()
