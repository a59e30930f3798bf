"""Graph networks of torch_geometric. Needs torch_geometric, none of its extensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_geometric.nn as graphs
from tests.models.zoo.architecture import Architecture, uniform
from torch import Tensor, nn

FAMILY = "graph"
NODES, FEATURES, EDGES = 8, 6, 20


def edges(seed: int = 11, nodes: int = NODES) -> Tensor:
    """Pairs of nodes, shape (2, EDGES)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, nodes, (2, EDGES), generator=generator)


class Graph(nn.Module):
    """Two convolutions, a norm, pooling per graph, and a classifier."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first = layer(FEATURES, 8)
        self.norm = graphs.BatchNorm(8)
        self.second = layer(8, 8)
        self.head = graphs.MLP([8, 8, 3], dropout=0.2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        x = self.second(x, edge_index)
        return self.head(graphs.global_mean_pool(x, batch))


class Relations(nn.Module):
    """Users and items, edges in both directions, one convolution for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = graphs.HeteroConv(
            {
                ("user", "buys", "item"): graphs.SAGEConv((4, 6), 8),
                ("item", "bought", "user"): graphs.GATConv((6, 4), 8, add_self_loops=False),
            }
        )
        self.heads = graphs.HeteroDictLinear(8, 3, types=["user", "item"])

    def forward(self, x: dict[str, Tensor], edge_index: dict[tuple[str, ...], Tensor]) -> Tensor:
        found = self.heads(self.layer(x, edge_index))
        return torch.cat(list(found.values()))


class Pooled(nn.Module):
    """Scores the nodes, keeps the best half, and pools with learnt aggregations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = graphs.GraphConv(FEATURES, 8)
        self.pool = graphs.TopKPooling(8, ratio=0.5)
        self.gather = graphs.MultiAggregation(["mean", graphs.SoftmaxAggregation(learn=True)])
        self.head = graphs.Linear(-1, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.conv(x, edge_index).relu()
        x, edge_index, _, batch, _, _ = self.pool(x, edge_index, batch=batch)
        return self.head(self.gather(x, batch))


def graph_loss(model: nn.Module) -> Tensor:
    """Loss of a class per graph, two graphs in a batch."""
    batch = torch.arange(NODES) // (NODES // 2)
    scores = model(uniform(12, NODES, FEATURES), edges(), batch)
    return nn.functional.cross_entropy(scores, torch.tensor([0, 2]))


def relations_loss(model: nn.Module) -> Tensor:
    """A loss on the scores of users and items."""
    x = {"user": uniform(12, NODES, 4), "item": uniform(13, NODES, 6)}
    links = {("user", "buys", "item"): edges(1), ("item", "bought", "user"): edges(2)}
    return model(x, links).square().mean()


def rates_loss(model: nn.Module) -> Tensor:
    """A loss on the embeddings of a graph's nodes."""
    return model(uniform(12, NODES, FEATURES), edges()).square().mean()


def molecule_loss(model: nn.Module) -> Tensor:
    """A loss on the energy of atoms at places; neighbours by distance."""
    return model(torch.arange(NODES) % 3 + 1, uniform(14, NODES, 3) * 3, edges()).square().mean()


def points_loss(model: nn.Module) -> Tensor:
    """A loss on features of points."""
    return model(uniform(12, NODES, FEATURES), uniform(13, NODES, 3), edges()).square().mean()


def isomorphism(inside: int, outside: int) -> nn.Module:
    """Sums neighbours, then a small network."""
    return graphs.GINConv(graphs.MLP([inside, 8, outside]), train_eps=True)


def graph(name: str, layer: Callable[[int, int], nn.Module]) -> Architecture:
    """A classifier of graphs with two of these layers."""
    return Architecture(name, FAMILY, lambda: Graph(layer), graph_loss)


ARCHITECTURES = [
    graph("gcn", graphs.GCNConv),
    graph("gcn-cached", lambda i, o: graphs.GCNConv(i, o, cached=True)),
    graph("graph-sage", lambda i, o: graphs.SAGEConv(i, o, aggr="max")),
    graph("gat", lambda i, o: graphs.GATConv(i, o // 2, heads=2, dropout=0.2)),
    graph("gat-v2", lambda i, o: graphs.GATv2Conv(i, o // 2, heads=2)),
    graph("gin", isomorphism),
    graph("graph-transformer", lambda i, o: graphs.TransformerConv(i, o // 2, heads=2)),
    graph("chebyshev", lambda i, o: graphs.ChebConv(i, o, K=2)),
    graph("edge-conv", lambda i, o: graphs.EdgeConv(graphs.MLP([2 * i, o]))),
    graph(
        "principal-aggregation",
        lambda i, o: graphs.PNAConv(
            i, o, ["mean", "std"], ["identity", "amplification"], deg=torch.tensor([1, 3, 4])
        ),
    ),
    Architecture("hetero", FAMILY, Relations, relations_loss),
    Architecture("top-k-pool", FAMILY, Pooled, graph_loss),
    Architecture(
        "jumping-knowledge",
        FAMILY,
        lambda: graphs.GraphSAGE(FEATURES, 8, 2, 3, jk="lstm", norm="graph_norm"),
        rates_loss,
    ),
    Architecture(
        "point-net", FAMILY, lambda: graphs.PointNetConv(graphs.MLP([FEATURES + 3, 8])), points_loss
    ),
]
