"""One module's entries of several ranks -> one entry of the whole module. Needs no process group.

A rank holds parts of weights, inputs and outputs. Here they are put together along the places that
each part was recorded with; what is whole on every rank is that of the first one.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import torch
from torch import Tensor

from modulelens.errors import Corrupted, ModuleLensError, NotFound, NotRebuildable
from modulelens.rebuild.table import rows_in
from modulelens.records import (
    Call,
    Metadata,
    ModuleNode,
    TensorRef,
    TensorSpec,
    as_ref,
    tensor_refs,
    to_json,
)
from modulelens.replay import Replay
from modulelens.store import LocalStore
from modulelens.stored import payload_of
from modulelens.tree import dtype_of, spec_of
from modulelens.tree.shards import BLOCKS, PART

_CALL_VALUES = (
    *("args", "kwargs", "output", "args_after", "kwargs_after", "buffers_after"),
    *("attributes_after", "grad_output", "grad_input"),
)
_NODE_VALUES = ("parameters", "buffers", "attributes")
_DIGEST = re.compile(rb'"([0-9a-f]{64})"')


def siblings(
    wanted: Metadata, others: Iterable[Metadata], ranks: AbstractSet[int]
) -> list[Metadata]:
    """Of a collection, the newest entry of each of these ranks and its own, of one job and step."""
    by_rank: dict[int, Metadata] = {}
    for other in sorted(_same_step(wanted, others), key=lambda each: each.version):
        if not other.merged and other.environment.rank in ranks | {wanted.environment.rank}:
            by_rank[other.environment.rank] = other
    return list(by_rank.values())


def is_last(wanted: Metadata, ranks: AbstractSet[int], others: Iterable[Metadata]) -> bool:
    """Whether it lies in parts on these ranks, and none is missing any more."""
    there = {part.environment.rank for part in siblings(wanted, others, ranks)} if ranks else ranks
    return bool(ranks) and ranks <= there


def merged_before(wanted: Metadata, others: Iterable[Metadata]) -> bool:
    """Whether another entry of the same parts, of the same step, was there before."""
    same = (m for m in _same_step(wanted, others) if m.merged == wanted.merged)
    return any(other.version < wanted.version for other in same)


def _same_step(wanted: Metadata, others: Iterable[Metadata]) -> list[Metadata]:
    job, step = wanted.environment.job, (wanted.step, wanted.moment)
    return [m for m in others if m.environment.job == job and (m.step, m.moment) == step]


def merge(store: LocalStore, parts: Sequence[Metadata]) -> tuple[Metadata, dict[str, Tensor]]:
    """The record (without version) and the small tensors of the whole module.

    Args:
        store: Holds the parts; the whole tensors are put there.
        parts: One entry per rank, of the same module and step.

    Raises:
        NotFound: A rank's entry is missing.
        NotRebuildable: Parts lie in a way that has no rule here.
        Corrupted: Records do not fit together, or say more than their bytes hold.
    """
    ordered = sorted(parts, key=lambda part: part.environment.rank)
    try:
        return _Merge(store, ordered).run()
    except ModuleLensError:
        raise
    except Exception as error:  # boundary: what the ranks' records say goes into torch's functions
        text = (
            f"the parts of {ordered[0].name} do not fit together: {type(error).__name__}: {error}"
        )
        raise Corrupted(text) from error


class _Merge:
    def __init__(self, store: LocalStore, parts: Sequence[Metadata]) -> None:
        self._store = store
        self._parts = parts
        self._replays = [Replay(payload_of(store, part)) for part in parts]
        self._made: dict[Any, dict[str, Any]] = {}
        self._nodes: dict[tuple[str, ...], str] = {}
        self._sizes: dict[str, int] = {}
        self._rows: dict[str, tuple[int, int]] = {}
        self._texts: list[bytes] = []

    def run(self) -> tuple[Metadata, dict[str, Tensor]]:
        """Merges calls and nodes, and says what of the first rank's bytes is still needed."""
        first = self._parts[0]
        counts = [len(part.calls) for part in self._parts]
        together = zip(*(part.calls for part in self._parts), strict=False)
        calls = tuple(self._call(found) for found in together)
        told = f"ranks kept {counts} calls: only the first {min(counts)} are put together"
        grads = self.value([part.param_grads for part in self._parts])
        self._texts.append(to_json(msgspec.structs.replace(first, calls=calls, param_grads=grads)))
        used = {found.decode() for text in self._texts for found in _DIGEST.findall(text)}
        sizes = first.blobs | self._sizes
        merged = msgspec.structs.replace(
            first,
            version=0,
            node=calls[0].node,
            calls=calls,
            param_grads=grads,
            blobs={digest: sizes[digest] for digest in sorted(used & sizes.keys())},
            own_bytes=sum(sizes[digest] for digest in used & sizes.keys()),
            grade=None,
            measurement=None,  # of a part
            profile=None,
            warnings=first.warnings + (told,) * (min(counts) < max(counts)),
            table_rows=first.table_rows | self._rows,
            merged=tuple(part.environment.rank for part in self._parts),
        )
        return merged, self._store.state(first.id)

    def _call(self, calls: Sequence[Call]) -> Call:
        node = self._node(tuple(call.node for call in calls))
        values = {name: self.value([getattr(c, name) for c in calls]) for name in _CALL_VALUES}
        return msgspec.structs.replace(calls[0], node=node, **values)

    def _node(self, digests: tuple[str, ...], path: str = "") -> str:
        if digests not in self._nodes:
            pairs = zip(self._replays, digests, strict=True)
            nodes: list[ModuleNode] = [replay.payload.node(digest) for replay, digest in pairs]
            children = {
                name: child
                and (self._node(tuple(_child(n, name) for n in nodes), f"{path}{name}."), child[1])
                for name, child in nodes[0].children.items()
            }
            values = {name: self.value([getattr(n, name) for n in nodes]) for name in _NODE_VALUES}
            for name, value in values["parameters"].items():
                for ref in tensor_refs(value, "$parameter"):
                    if ref.rows is not None:
                        self._rows.setdefault(f"{path}{name}", (ref.rows, ref.spec.shape[0]))
            data = to_json(msgspec.structs.replace(nodes[0], children=children, **values))
            self._texts.append(data)
            self._nodes[digests] = self._put(data)
        return self._nodes[digests]

    def _put(self, data: bytes | memoryview) -> str:
        (digest,) = self._store.put_blobs([data])
        self._sizes[digest] = memoryview(data).nbytes
        return digest

    def value(self, found: Sequence[Any]) -> Any:
        """The first rank's value, with the parts in it put together."""
        first = found[0]
        if isinstance(first, dict):
            if PART in first:
                return self._whole([each[PART] for each in found])
            if BLOCKS in first:
                return self._table([each[BLOCKS] for each in found])
            return {key: self.value([_item(each, key, first) for each in found]) for key in first}
        if isinstance(first, list):
            places = range(len(first))
            return [self.value([_item(each, place, first) for each in found]) for place in places]
        return first

    def _whole(self, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        body = bodies[0]
        local = next(iter(body["local"].values()))
        number = as_ref(local).object
        key: Any = number if number >= 0 else ("of no object", len(self._made))
        if key not in self._made:
            ranks = self._ranks(body)
            order = [ranks.index(rank) for rank in body["ranks"]]
            locals_ = [self._replays[i].value(bodies[i]["local"]).detach() for i in order]
            whole = _in_layout(join(locals_, body["mesh"], body["placements"]), body)
            flat = torch.empty(0, dtype=torch.uint8).set_(whole.untyped_storage())
            self._made[key] = self._ref(
                body, spec_of(whole), flat, object=number, leaf=as_ref(local).leaf
            )
        return self._made[key]

    def _ranks(self, body: dict[str, Any]) -> list[int]:
        ranks = [part.environment.rank for part in self._parts]
        missing = sorted(set(body["ranks"]) - set(ranks))
        if missing:
            name = self._parts[0].name
            raise NotFound(f"{name} lies on ranks {body['ranks']}; there is none of {missing}")
        return ranks

    def _ref(self, body: Any, spec: TensorSpec, flat: Tensor | None, **more: Any) -> dict[str, Any]:
        ref = TensorRef(
            spec=msgspec.structs.replace(spec, requires_grad=body["requires_grad"]),
            group=(1 << 30) + len(self._made),
            nbytes=0 if flat is None else flat.numel(),
            blob=None if flat is None else self._put(flat.numpy().data),
            **more,
        )
        return {"$parameter" if body.get("parameter") else "$tensor": ref}

    def _table(self, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A table of the blocks of all ranks; of touched rows, where some have these only."""
        self._ranks(bodies[0])
        blocks = [
            (replay, part["at"], as_ref(part["block"]["$tensor"]))
            for replay, body in zip(self._replays, bodies, strict=True)
            for part in body["local"]
        ]
        key = tuple((ref.blob, *at) for _, at, ref in blocks)
        if key not in self._made:
            self._made[key] = self._joined(bodies[0], blocks)
        return self._made[key]

    def _joined(
        self, body: dict[str, Any], blocks: list[tuple[Replay, Any, TensorRef]]
    ) -> dict[str, Any]:
        (total, width), first = body["shape"], blocks[0][2]
        spec = msgspec.structs.replace(first.spec, shape=(total, width), stride=(width, 1))
        if not all(ref.kept for _, _, ref in blocks):
            return self._ref(body, spec, None, stats=first.stats)
        partly = any(ref.rows is not None for _, _, ref in blocks)
        found = [(*self._rows_of(replay, ref), *at) for replay, at, ref in blocks]
        if not partly and sum(rows.numel() for _, rows, *_ in found) != total * width:
            raise Corrupted(f"{len(found)} blocks make no table of {total:,} x {width:,}")
        numbers = torch.arange(0 if partly else total)
        if partly:
            numbers = torch.cat([own + row for own, _, row, _ in found]).unique()
        most = len(found) * sum(rows.numel() for _, rows, *_ in found)  # blocks side by side
        if len(numbers) * width > most or (len(numbers) and int(numbers.max()) >= total):
            raise Corrupted(f"{len(found)} blocks make no table of {total:,} x {width:,}")
        whole = torch.zeros(len(numbers), width, dtype=found[0][1].dtype)
        for own, rows, row, column in found:
            places = torch.searchsorted(numbers, own + row)
            whole[places, column : column + rows.shape[1]] = rows
        flat = whole.view(torch.uint8).reshape(-1)
        if not partly:
            return self._ref(body, spec, flat)
        return self._ref(
            body, spec, torch.cat([flat, numbers.view(torch.uint8)]), rows=len(numbers)
        )

    def _rows_of(self, replay: Replay, ref: TensorRef) -> tuple[Tensor, Tensor]:
        """The numbers of a block's rows in it, and these."""
        if ref.rows is None or ref.blob is None:
            rows = replay.value({"$tensor": ref})
            return torch.arange(len(rows)), rows
        data = bytearray(self._store.blob_bytes(ref.blob))
        kept = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        numbers, flat = rows_in(ref, kept.untyped_storage())
        return numbers, flat.contiguous().view(dtype_of(ref.spec.dtype))


def join(parts: Sequence[Tensor], mesh: Sequence[int], placements: Sequence[Any]) -> Tensor:
    """The whole of which the ranks of a mesh hold parts.

    Args:
        parts: In the order of the mesh's ranks.
        mesh: Its shape.
        placements: How the whole lies along each of its dimensions.

    Raises:
        NotRebuildable: A placement has no rule here.
    """
    if not mesh:
        return parts[0]
    size = math.prod(mesh[1:])
    inner = [
        join(parts[i * size : (i + 1) * size], mesh[1:], placements[1:]) for i in range(mesh[0])
    ]
    kind, dim = placements[0]["kind"], placements[0].get("dim", 0)
    if kind == "Shard":
        return torch.cat(inner, dim)
    if kind == "Replicate":
        return inner[0]
    if kind == "Partial" and placements[0].get("reduce_op") == "sum":
        return functools.reduce(torch.add, inner)
    raise NotRebuildable(f"parts that lie as {placements[0]} have no rule", reason="sharded")


def _in_layout(whole: Tensor, body: dict[str, Any]) -> Tensor:
    """In memory with the strides that the live one had; where those have no gaps."""
    if list(whole.shape) != body["shape"]:
        raise Corrupted(f"parts make a tensor of {list(whole.shape)}, not {body['shape']}")
    order = sorted(range(whole.dim()), key=lambda dim: -body["stride"][dim])
    return whole.permute(order).contiguous().permute([order.index(d) for d in range(whole.dim())])


def _child(node: ModuleNode, name: str) -> str:
    child = node.children.get(name)
    if child is None:
        raise NotFound(f"{node.fqn or node.cls} has no {name} on another rank")
    return child[0]


def _item(found: Any, key: Any, first: Any) -> Any:
    """What another rank has in that place, else what the first one has."""
    try:
        return found[key]
    except (KeyError, IndexError, TypeError):
        return first[key]
