"""Collections of embedding tables that TorchRec spread over the ranks of a job.

A sharded collection stands for a plain one, which is made here without memory: its class, its
configs and its fqns are recorded, with the values of the tables that lie on this rank. So are the
lookups inside, each as the plain collection of this rank's tables. Knows where TorchRec keeps what;
calls no collective, and touches neither what is awaited nor a `ShardedTensor`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from modulelens.capture.init import KEY, InitRecord
from modulelens.capture.snapshot import Snapshots
from modulelens.capture.tables import LARGE_BYTES, Rows
from modulelens.capture.wrappers import of_framework
from modulelens.context import preserved_rng
from modulelens.errors import NotRebuildable
from modulelens.records import TensorRef
from modulelens.tree.shards import BLOCKS

#: Ways of keeping a table whose memory holds its present values.
_READABLE = frozenset({"dense", "fused", "fused_uvm", "fused_triton"})
_BAGS, _SEQUENCES = "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"


class Block:
    """The part of one table that lies on this rank: `at` is its first row and column there.

    `rows` are those that are looked up, where these will do; they are taken from `live`.
    """

    def __init__(self, table: Any, kernel: str) -> None:
        placed = table.local_metadata
        self.table, self.kernel = str(table.name), kernel
        self.at = list(placed.shard_offsets) if placed is not None else [0, 0]
        self.features = len(table.feature_names)
        self.live: Tensor | None = None
        self._copy: Tensor | None = None
        self.rows: Rows | None = None
        self._ref: TensorRef | None = None

    def note(self, live: Tensor, snapshots: Snapshots, *, touched: bool) -> bool:
        """Notes its values. The memory is the optimizer's, which writes to it: nothing is shared.

        Args:
            live: The values.
            snapshots: Where they go.
            touched: Of a large one the rows will do that are looked up.

        Returns:
            Whether they are others than before.
        """
        self.live = live = live.detach()
        if self.kernel not in _READABLE:
            return False
        if touched and live.nbytes >= LARGE_BYTES:
            if self.rows is not None and self.rows.same(live):
                return False
            self.rows = Rows(live)
            self._ref = snapshots.rows_of(live, self.rows)
        else:
            if self._copy is not None and torch.equal(self._copy, live):
                return False
            self._copy = live.clone()
            self._ref = snapshots.ref(self._copy)
        return True

    @property
    def ref(self) -> TensorRef:
        """The reference of its values, as they were noted last.

        Raises:
            NotRebuildable: They cannot be read.
        """
        if self._ref is None:
            text = f"the values of {self.table}, kept by the kernel {self.kernel!r}, were not read"
            raise NotRebuildable(text, reason="not_kept")
        return self._ref

    def parameter(self) -> Any:
        """It alone, as a parameter."""
        spec = msgspec.structs.replace(self.ref.spec, requires_grad=True)
        return {"$parameter": msgspec.structs.replace(self.ref, spec=spec)}


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A part of the collection that reads the tables which lie on this rank in one way.

    `plain` is the collection of these alone; its tables and `blocks` are in the order of features.
    """

    number: int
    live: nn.Module
    plain: nn.Module
    blocks: list[Block]

    def note(self, snapshots: Snapshots, *, touched: bool) -> bool:
        """Notes the values of its tables; whether there are new ones."""
        kernels: Any = self.live._modules["_emb_modules"]
        values = [v for kernel in kernels for v in kernel.emb_module.split_embedding_weights()]
        pairs = zip(self.blocks, values, strict=True)
        new = [block.note(live, snapshots, touched=touched) for block, live in pairs]
        return any(new)

    def look_up(self, features: Any) -> None:
        """It is about to be called with these features, of all ranks."""
        if all(block.rows is None for block in self.blocks):
            return
        bounds, place = features.offset_per_key(), 0
        for block in self.blocks:
            low, high = bounds[place], bounds[place + block.features]
            if block.rows is not None and block.live is not None:
                block.rows.add(block.live, features.values()[low:high])
            place += block.features

    def output(self, features: Any, found: Tensor) -> Any:
        """What the plain collection gives where the lookup gave one tensor."""
        sparse: Any = sys.modules["torchrec.sparse.jagged_tensor"]
        plain: Any = self.plain
        if hasattr(plain, "_lengths_per_embedding"):
            return sparse.KeyedTensor(
                plain._embedding_names, plain._lengths_per_embedding, found, key_dim=1
            )
        names = [name for names in plain._embedding_names_by_table for name in names]
        widths = [t.embedding_dim for t in plain._embedding_configs for _ in t.feature_names]
        counts = features.length_per_key()
        values = found.split([n * width for n, width in zip(counts, widths, strict=True)])
        lengths = features.lengths().split(features.stride_per_key())
        return {
            name: sparse.JaggedTensor(values=value.view(-1, width), lengths=length)
            for name, width, value, length in zip(names, widths, values, lengths, strict=True)
        }


class Collection:
    """A sharded collection and the plain one that it stands for."""

    def __init__(self, live: nn.Module) -> None:
        self.live = live
        self._bags = type(live).__name__ == _BAGS
        inside: Any = vars(live)
        configs = inside["_embedding_bag_configs" if self._bags else "_embedding_configs"]
        given = _as_given(configs, inside)
        flag = "is_weighted" if self._bags else "need_indices"
        self.plain = self._made(given, **{flag: inside[f"_{flag}"]})
        parallel = nn.parallel.DistributedDataParallel
        inner = [each.module if isinstance(each, parallel) else each for each in inside["_lookups"]]
        self.lookups = [
            self._lookup(i, each) for i, each in enumerate(inner) if each.grouped_configs
        ]
        self.weights = list(self._weights(inside["module_sharding_plan"], given))

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module, str]]:
        """What is called, the plain collection it stands for, and its path from here."""
        yield self.live, self.plain, ""
        for lookup in self.lookups:
            yield lookup.live, lookup.plain, f"_lookups.{lookup.number}"

    def modules(self) -> Iterator[nn.Module]:
        """All that stand for something here."""
        for _, plain, _ in self.pairs():
            yield from plain.modules()

    def note(self, snapshots: Snapshots, *, touched: bool) -> bool:
        """Notes the values of all tables that lie on this rank; whether there are new ones."""
        new = [lookup.note(snapshots, touched=touched) for lookup in self.lookups]
        if self.plain.training is not self.live.training:
            for module in self.modules():
                module.training = self.live.training
            new.append(True)
        return any(new)

    def _weights(self, plan: Any, configs: Any) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
        """Each module that holds a table, and what gives the JSON of its weight."""
        for lookup in self.lookups:
            for module, block in zip(_tables(lookup.plain), lookup.blocks, strict=True):
                yield module, block.parameter
        blocks: dict[str, list[Block]] = {}
        for block in (block for lookup in self.lookups for block in lookup.blocks):
            blocks.setdefault(block.table, []).append(block)
        for module, config in zip(_tables(self.plain), configs, strict=True):
            own = blocks.get(config.name, [])
            spec = plan[config.name].sharding_spec
            if spec is None:  # each rank has all of it
                yield module, own[0].parameter
            else:
                yield module, functools.partial(_in_blocks, config, own, spec.shards)

    def _lookup(self, number: int, live: Any) -> Lookup:
        named: Any = sys.modules["torchrec.modules.embedding_configs"]
        config = named.EmbeddingBagConfig if self._bags else named.EmbeddingConfig
        blocks, configs, seen = [], [], dict[str, int]()
        for group, kernel in zip(live.grouped_configs, live._modules["_emb_modules"], strict=True):
            pooling = {"pooling": named.PoolingType[kernel._pooling.name]} if self._bags else {}
            for table in group.embedding_tables:
                blocks.append(Block(table, group.compute_kernel.value))
                same = seen[table.name] = seen.get(table.name, -1) + 1
                configs.append(
                    config(
                        name=f"{table.name}_{same}" if same else table.name,
                        num_embeddings=table.local_rows,
                        embedding_dim=table.local_cols,
                        feature_names=list(table.feature_names),
                        data_type=table.data_type,
                        **pooling,
                    )
                )
        weighted = {"is_weighted": live.grouped_configs[0].is_weighted} if self._bags else {}
        return Lookup(number, live, self._made(configs, **weighted), blocks)

    def _made(self, configs: list[Any], **more: Any) -> nn.Module:
        found: Any = sys.modules["torchrec.modules.embedding_modules"]
        cls = found.EmbeddingBagCollection if self._bags else found.EmbeddingCollection
        more["tables"] = configs
        with preserved_rng(), torch.device("meta"):
            made = cls(**more)
        made.__dict__[KEY] = record = InitRecord(made, (), more)
        record.confirmed = True
        made._device = torch.device("cpu")
        made.train(self.live.training)
        return made  # type: ignore[no-any-return]


def sharded(module: nn.Module) -> Collection | None:
    """The collection that a module is, where TorchRec made it of a plain one; else None."""
    if not of_framework(type(module)) or type(module).__name__ not in (_BAGS, _SEQUENCES):
        return None
    try:
        return Collection(module)
    except Exception:  # noqa: BLE001 - boundary: another TorchRec may keep it all elsewhere
        return None


def is_spread(module: nn.Module) -> bool:
    """Whether it is one of TorchRec's modules over ranks."""
    return any(
        base.__name__ == "ShardedModule" and of_framework(base) for base in type(module).__mro__
    )


def _as_given(configs: list[Any], inside: Any) -> list[Any]:
    """In the order of the outputs, which is that of the plan."""
    found: Any = sys.modules["torchrec.modules.embedding_modules"]
    order = {name: place for place, name in enumerate(inside.get("_embedding_names", []))}
    places = [
        min((order[name] for name in names if name in order), default=0)
        for names in found.get_embedding_names_by_table(configs)
    ]
    return [configs[i] for i in sorted(range(len(configs)), key=places.__getitem__)]


def _in_blocks(config: Any, own: list[Block], shards: list[Any]) -> Any:
    """A table as this rank's blocks, and where those of all ranks lie."""
    blocks = [[s.placement.rank(), *s.shard_offsets, *s.shard_sizes] for s in shards]
    return {
        BLOCKS: {
            "shape": [config.num_embeddings, config.embedding_dim],
            "ranks": sorted({block[0] for block in blocks}),
            "blocks": blocks,
            "local": [{"at": block.at, "block": {"$tensor": block.ref}} for block in own],
            "parameter": True,
            "requires_grad": True,
        }
    }


def _tables(plain: Any) -> list[nn.Module]:
    held = plain.embedding_bags if hasattr(plain, "embedding_bags") else plain.embeddings
    return list(held.values())
