"""A tiny ranking model with embedding tables and sparse features. Knows no tracing."""

from __future__ import annotations

import torch
from tests.models.harness import Case
from tests.models.transformers_zoo import under_autocast
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain

KEYS = ["user", "item", "shop"]
BATCH = 5
ROWS = 40


def tables(*, shared: bool = False) -> EmbeddingBagCollection:
    """Three features; with `shared`, two of them look up one table."""
    groups = [["user", "item"], ["shop"]] if shared else [[key] for key in KEYS]
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"table_{'_'.join(features)}",
                embedding_dim=8,
                num_embeddings=ROWS,
                feature_names=features,
                pooling=PoolingType.SUM if index else PoolingType.MEAN,
            )
            for index, features in enumerate(groups)
        ]
    )


def dlrm() -> nn.Module:
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=tables(),
            dense_in_features=4,
            dense_arch_layer_sizes=[16, 8],
            over_arch_layer_sizes=[16, 1],
        )
    )


def dlrm_shared() -> nn.Module:
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=tables(shared=True),
            dense_in_features=4,
            dense_arch_layer_sizes=[16, 8],
            over_arch_layer_sizes=[16, 1],
        )
    )


def dlrm_cross() -> nn.Module:
    return DLRMTrain(
        DLRM_DCN(
            embedding_bag_collection=tables(),
            dense_in_features=4,
            dense_arch_layer_sizes=[16, 8],
            over_arch_layer_sizes=[16, 1],
            dcn_num_layers=2,
            dcn_low_rank_dim=4,
        )
    )


def batch() -> Batch:
    """Dense features, lists of ids of uneven length (some empty), and clicks."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (len(KEYS) * BATCH,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return Batch(
        dense_features=torch.rand(BATCH, 4, generator=generator),
        sparse_features=KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths),
        labels=torch.randint(0, 2, (BATCH,), generator=generator),
    )


def click_step(model: nn.Module) -> Tensor:
    """Loss of a batch of clicks."""
    loss, _ = model(batch())
    return loss


CASES = [
    Case("dlrm", dlrm, click_step),
    Case("dlrm bf16", dlrm, under_autocast(click_step)),
    Case("dlrm shared table", dlrm_shared, click_step),
    Case("dlrm cross", dlrm_cross, click_step),
]
