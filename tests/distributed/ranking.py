"""Small ranking models whose tables TorchRec spreads over ranks, one per property."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.streamable import Pipelineable

ROWS = (50, 40)
LARGE_ROWS = 40_000
WIDTH = 16


@dataclasses.dataclass
class Batch(Pipelineable):
    """What a pipeline takes."""

    dense: Tensor
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """On another device."""
        dense = self.dense.to(device, non_blocking=non_blocking)
        return Batch(dense, self.features.to(device, non_blocking))

    def record_stream(self, stream: Any) -> None:
        """Nothing on the CPU."""

    def pin_memory(self) -> Batch:
        """As it is."""
        return self


def bags(
    rows: tuple[int, int] = ROWS, *, weighted: bool = False, mean: bool = False
) -> EmbeddingBagCollection:
    """Two tables, the first one of two features."""
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=count,
            embedding_dim=WIDTH,
            feature_names=features,
            pooling=pooling,
        )
        for name, count, features in zip(("t1", "t2"), rows, (["f1", "f3"], ["f2"]), strict=True)
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


class Ranking(nn.Module):
    """Uses all outputs at once, in the order in which they come."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc
        self.dense = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.over = nn.Linear(8 + 3 * WIDTH, 1)

    def forward(self, batch: Batch) -> Tensor:
        """The scores, of shape (batch, 1)."""
        pooled = self.ebc(batch.features)
        found: Tensor = self.over(torch.cat([self.dense(batch.dense), pooled.values()], 1))
        return found


class Pipelined(Ranking):
    """Gives a loss as well, as a pipeline asks for."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The loss and the scores."""
        scores = super().forward(batch)
        return scores.square().mean(), scores


class Sparse(nn.Module):
    """Hands on what its collection gave, and waits for nothing."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The pooled embeddings."""
        pooled: KeyedTensor = self.ebc(features)
        return pooled


class Over(nn.Module):
    """Is called with what is not there yet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * WIDTH, 1)

    def forward(self, pooled: KeyedTensor) -> Tensor:
        """The scores."""
        found: Tensor = self.linear(torch.cat([pooled["f1"], pooled["f2"], pooled["f3"]], 1))
        return found


class HandsOn(nn.Module):
    """A lazy value passes through two modules."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.sparse = Sparse(ebc)
        self.over = Over()

    def forward(self, batch: Batch) -> Tensor:
        """The scores."""
        found: Tensor = self.over(self.sparse(batch.features))
        return found


class WaitsTwice(Ranking):
    """Waits by hand, and then again by using what it got before."""

    def forward(self, batch: Batch) -> Tensor:
        """The scores."""
        lazy: Any = self.ebc(batch.features)
        first: KeyedTensor = lazy.wait()
        both = lazy.values() + first.values()
        scores: Tensor = self.over(torch.cat([self.dense(batch.dense), both], 1))
        return scores


class Unused(nn.Module):
    """Never looks at what its collection gives."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc
        self.dense = nn.Linear(5, 1)

    def forward(self, batch: Batch) -> Tensor:
        """The scores."""
        self.ebc(batch.features)
        found: Tensor = self.dense(batch.dense)
        return found


class Sequences(nn.Module):
    """One embedding per value, not pooled."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=name, num_embeddings=count, embedding_dim=WIDTH, feature_names=features
            )
            for name, count, features in zip(
                ("t1", "t2"), ROWS, (["f1", "f3"], ["f2"]), strict=True
            )
        ]
        self.ec = EmbeddingCollection(tables=tables)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch) -> Tensor:
        """One score per value of each feature."""
        found = self.ec(batch.features)
        every = [found[name].values() for name in ("f1", "f2", "f3")]
        scores: Tensor = self.over(torch.cat(every))
        return scores


def batch_of(rows: int, *, weighted: bool = False) -> Batch:
    """Four samples, drawn from torch's stream."""
    lengths = torch.randint(0, 5, (3 * 4,))
    values = torch.randint(0, rows, (int(lengths.sum()),))
    weights = torch.rand(len(values)) if weighted else None
    features = KeyedJaggedTensor(["f1", "f2", "f3"], values, weights, lengths)
    return Batch(torch.randn(4, 5), features)
