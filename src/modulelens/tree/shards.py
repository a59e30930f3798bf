"""Tensors of which a process holds a part <-> that part, and where it lies in the whole.

Knows no process group: reading a record needs none, and what is made of it is the part alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modulelens.errors import Corrupted, NotRebuildable

#: The kind of value that a `DTensor` is.
PART = "$dtensor"
#: The kind of value that a table in blocks is, each with its place (row, column) in the whole.
BLOCKS = "$blocks"


def is_part(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`; asked for by name, so that the package need not be loaded."""
    cls = type(tensor)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.")


def arrived(tensor: Any) -> Tensor | None:
    """The plain tensor that an `AsyncCollectiveTensor` stands for, once it is there; else None."""
    return tensor.trigger_wait() if _is_on_its_way(tensor) else None


def _is_on_its_way(tensor: Tensor) -> bool:
    cls = type(tensor)
    return cls.__name__ == "AsyncCollectiveTensor" and cls.__module__.startswith("torch.dist")


def is_awaitable(cls: type) -> bool:
    """Whether objects of the class stand for a value that TorchRec waits for when it is used."""
    return any(
        base.__name__ == "LazyAwaitable" and base.__module__.startswith("torchrec.")
        for base in cls.__mro__
    )


def take_part(tensor: Any) -> dict[str, Any]:
    """This process's part, and where it is: by placement along each dimension of the mesh."""
    spec = tensor._spec
    mesh = spec.mesh
    return {
        "local": tensor._local_tensor,
        "placements": [_placement(placement) for placement in spec.placements],
        "mesh": list(mesh.shape),
        "ranks": mesh.mesh.reshape(-1).tolist(),
        "names": list(mesh.mesh_dim_names or ()),
        "coordinate": list(mesh.get_coordinate() or ()),
        "shape": list(spec.shape),
        "stride": list(spec.stride),
    }


def inside(tensor: Any) -> Tensor:
    """The plain tensor that stands in a record for a part, or for one that arrived."""
    if is_part(tensor):
        return tensor._local_tensor  # type: ignore[no-any-return]
    return tensor.elem if _is_on_its_way(tensor) else tensor  # type: ignore[no-any-return]


def parts_in(value: Any) -> list[dict[str, Any]]:
    """The bodies of all parts inside structures that are not whole.

    Raises:
        Corrupted: A part does not say where it lies.
    """
    if isinstance(value, dict):
        if PART in value or BLOCKS in value:
            body: Any = value.get(PART) or value.get(BLOCKS)
            try:
                return [body] if frozenset(body["ranks"]) and not _is_whole(body) else []
            except (KeyError, TypeError) as error:
                raise Corrupted(f"a part of a tensor cannot be read: {error!r}") from error
        value = list(value.values())
    return [b for item in value for b in parts_in(item)] if isinstance(value, (list, tuple)) else []


def _is_whole(body: dict[str, Any]) -> bool:
    if "blocks" in body:
        return len(body["local"]) >= len(body["blocks"])
    return all(placement["kind"] == "Replicate" for placement in body["placements"])


def _placement(placement: Any) -> dict[str, Any]:
    named = {name: getattr(placement, name, None) for name in ("dim", "reduce_op", "split_factor")}
    return {"kind": type(placement).__name__} | {n: v for n, v in named.items() if v is not None}


def divide_bias(parameters: dict[str, Any]) -> None:
    """Notes at the bias of a row-wise linear layer among how many ranks it is divided.

    Each of them computes `x_part @ weight_part + bias / ranks`, a share of a sum.
    """
    weight, bias = ((parameters.get(name) or {}).get(PART) for name in ("weight", "bias"))
    if weight and bias:
        rows = {"kind": "Shard", "dim": 1}
        where = zip(weight["mesh"], weight["placements"], bias["placements"], strict=True)
        ranks = math.prod(n for n, w, b in where if w == rows and b["kind"] == "Replicate")
        bias |= {"divided": ranks} if ranks > 1 else {}


def part_made(local: Tensor, divided: int = 1, **_where: Any) -> Tensor:
    """The part as a plain tensor, as it is computed with."""
    return local if divided == 1 else local / divided


def table_made(
    local: list[dict[str, Any]], blocks: list[Any], shape: list[int], ranks: list[int]
) -> Tensor:
    """The table, where all of its blocks are here.

    Raises:
        NotRebuildable: Other ranks have some.
    """
    if len(local) < len(blocks):
        text = f"a table of {shape[0]:,} rows lies on ranks {ranks}: merge their entries"
        raise NotRebuildable(text, reason="sharded")
    parts: list[Tensor] = [part["block"] for part in local]
    if len(parts) == 1 and list(parts[0].shape) == shape:
        return parts[0]
    if sum(part.numel() for part in parts) != math.prod(shape):
        raise Corrupted(f"blocks of {[list(part.shape) for part in parts]} make no {shape}")
    whole = torch.zeros(shape, dtype=parts[0].dtype, device=parts[0].device)
    for part, (row, column) in zip(parts, (each["at"] for each in local), strict=True):
        whole[row : row + len(part), column : column + part.shape[1]] = part
    return whole
