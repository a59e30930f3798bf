r"""A small DLRM, its tables spread over two CPU ranks by TorchRec's DistributedModelParallel.

Needs torchrec and fbgemm-gpu-cpu. Trace both ranks in the third step, without touching this file:

    torchrun --nproc-per-node 2 -m modulelens trace --ranks all --warmup 2 \
        --repo lens -- examples/dlrm_dmp.py

Each rank stores its dense modules, and its lookups (`tables._lookups.0`) with the rows it looked
up; the last one to store puts the tables of both together: `tables` is a plain
EmbeddingBagCollection, and the model that holds it is rebuilt in one process.

    modulelens ls --repo lens
    modulelens check DLRM/tables --repo lens
    modulelens check DLRM --repo lens
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

FEATURES, ROWS, WIDTH, DENSE = ("user", "item", "shop"), 1_000, 16, 13
BATCH, STEPS = 32, 4


class DLRM(nn.Module):
    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        pairs = (len(FEATURES) + 1) * len(FEATURES) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        pooled = self.tables(sparse)
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(pooled[name] for name in FEATURES)], dim=1)
        rows, columns = torch.triu_indices(len(FEATURES) + 1, len(FEATURES) + 1, offset=1)
        crossed = (vectors @ vectors.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([bottom, crossed], dim=1)).squeeze(-1)


def sharded(tables: EmbeddingBagCollection, ranks: int) -> DistributedModelParallel:
    """The model, with table i on rank i modulo the number of ranks."""
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        tables,
        {f"t_{name}": table_wise(rank=i % ranks) for i, name in enumerate(FEATURES)},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    return DistributedModelParallel(
        DLRM(tables),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[sharder],
    )


def batch(rank: int, step: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Dense features, ids of every sparse one, and labels; of every rank its own."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    sparse = KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths)
    labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
    return torch.randn(BATCH, DENSE, generator=generator), sparse, labels


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name]
        )
        for name in FEATURES
    ]
    model = sharded(EmbeddingBagCollection(tables=configs), dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        dense, sparse, labels = batch(rank, step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
