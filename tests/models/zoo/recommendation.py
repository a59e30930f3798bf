"""Ranking models of torchrec on jagged features. Needs torchrec and fbgemm."""

from __future__ import annotations

import torch
from tests.models.zoo.architecture import Architecture, uniform
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

FAMILY = "ranking"
KEYS = ["user", "item", "shop"]
BATCH = 5
ROWS = 40
DENSE = {"dense_in_features": 4, "dense_arch_layer_sizes": [16, 8]}
OVER = {"over_arch_layer_sizes": [16, 1]}


def tables(*, shared: bool = False, weighted: bool = False) -> EmbeddingBagCollection:
    """Three features; with `shared`, two of them look up one table."""
    groups = [["user", "item"], ["shop"]] if shared else [[key] for key in KEYS]
    return EmbeddingBagCollection(
        is_weighted=weighted,
        tables=[
            EmbeddingBagConfig(
                name=f"table_{'_'.join(features)}",
                embedding_dim=8,
                num_embeddings=ROWS,
                feature_names=features,
                pooling=PoolingType.SUM if index or weighted else PoolingType.MEAN,
            )
            for index, features in enumerate(groups)
        ],
    )


def dlrm() -> nn.Module:
    """Dense and sparse features, their products, and a classifier."""
    return DLRMTrain(DLRM(embedding_bag_collection=tables(), **DENSE, **OVER))


def dlrm_shared() -> nn.Module:
    """Two features share a table, which is called twice."""
    return DLRMTrain(DLRM(embedding_bag_collection=tables(shared=True), **DENSE, **OVER))


def dlrm_cross() -> nn.Module:
    """Low-rank crosses instead of products."""
    sizes = {**DENSE, **OVER, "dcn_num_layers": 2, "dcn_low_rank_dim": 4}
    return DLRMTrain(DLRM_DCN(embedding_bag_collection=tables(), **sizes))


def dlrm_projection() -> nn.Module:
    """Projections before the products."""
    branches = {"interaction_branch1_layer_sizes": [16], "interaction_branch2_layer_sizes": [16]}
    sizes = {**DENSE, **OVER, **branches}
    return DLRMTrain(DLRM_Projection(embedding_bag_collection=tables(), **sizes))


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


def click_loss(model: nn.Module) -> Tensor:
    """Loss of a batch of clicks."""
    loss, _ = model(batch())
    return loss


def deepfm() -> nn.Module:
    """Factorisation machine and deep part side by side."""
    return SimpleDeepFMNN(
        num_dense_features=4,
        embedding_bag_collection=tables(),
        hidden_layer_size=16,
        deep_fm_dimension=4,
    )


def score_loss(model: nn.Module) -> Tensor:
    """A loss on the scores."""
    given = batch()
    return model(given.dense_features, given.sparse_features).square().mean()


def bags_loss(model: nn.Module) -> Tensor:
    """A loss on pooled embeddings."""
    return model(batch().sparse_features).values().square().mean()


def weighted_loss(model: nn.Module) -> Tensor:
    """A loss on weighted sums of embeddings."""
    given = batch().sparse_features
    features = KeyedJaggedTensor(
        keys=KEYS,
        values=given.values(),
        lengths=given.lengths(),
        weights=uniform(3, given.values().numel()),
    )
    return model(features).values().square().mean()


def sequences_loss(model: nn.Module) -> Tensor:
    """A loss on embeddings of sequences, one jagged tensor per feature."""
    found = model(batch().sparse_features)
    return torch.stack([one.values().square().mean() for one in found.values()]).nansum()


def sequences() -> nn.Module:
    """Tables whose rows are not pooled."""
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=f"table_{key}", embedding_dim=8, num_embeddings=ROWS, feature_names=[key]
            )
            for key in KEYS
        ]
    )


def weighted_tables() -> nn.Module:
    """Bags with a weight per id."""
    return tables(weighted=True)


def positions() -> nn.Module:
    """Bags whose weights are learnt by position."""
    return FeatureProcessedEmbeddingBagCollection(
        tables(weighted=True), PositionWeightedModuleCollection(dict.fromkeys(KEYS, 10))
    )


ARCHITECTURES = [
    Architecture("dlrm", FAMILY, dlrm, click_loss),
    Architecture("dlrm-shared-table", FAMILY, dlrm_shared, click_loss),
    Architecture("dlrm-cross", FAMILY, dlrm_cross, click_loss),
    Architecture("dlrm-projection", FAMILY, dlrm_projection, click_loss),
    Architecture("deepfm", FAMILY, deepfm, score_loss),
    Architecture("bags", FAMILY, tables, bags_loss),
    Architecture("weighted-bags", FAMILY, weighted_tables, weighted_loss),
    Architecture("position-weights", FAMILY, positions, bags_loss),
    Architecture("sequence-tables", FAMILY, sequences, sequences_loss),
]
