"""Sees which rows of large embedding tables a step looks up. Knows modules and torch's lookups.

A table may be larger than all else together, and the optimizer would pay for copying what a
snapshot shares with it. So of a large table that only lookups use, the rows are taken when they
are looked up, and nothing is shared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from modulelens.capture.hook import Undo, hook_gradient, unseen, wrap_function
from modulelens.capture.snapshot import Snapshots
from modulelens.capture.tables import LARGE_BYTES, is_whole
from modulelens.tree import is_plain

_KINDS = (nn.Embedding, nn.EmbeddingBag)
#: What `torch.nn.functional` calls for them.
_NAMES = ("embedding", "embedding_bag")
_C: Any = torch._C


class Lookups:
    """Takes the rows that are looked up while it is installed.

    Args:
        snapshots: Where they go.
        tables: The tables to watch.
        lock: Held while rows are taken: several threads may call one model.
    """

    def __init__(self, snapshots: Snapshots, tables: Iterable[Tensor], lock: Any) -> None:
        self._snapshots = snapshots
        self._lock = lock
        self._tables = {id(table): table for table in tables}
        snapshots.watch_tables(self._tables.values())

    def install(self, undo: Undo) -> None:
        """From now on sees every lookup; `undo` ends that."""
        for name in _NAMES if self._tables else ():
            wrap_function(undo, name, self._lookup)
        for table in self._tables.values():
            if table.requires_grad and table.is_leaf:
                hook = functools.partial(self._note, self._snapshots.look_back, table)
                hook_gradient(undo, table, hook)

    def ref(self, parameter: int, gradient: Tensor) -> Any:
        """The reference of a gradient that arrived at the parameter of that `id`."""
        table = self._tables.get(parameter)
        if table is None:
            return self._snapshots.ref(gradient)
        return self._snapshots.rows_like(table, gradient)

    def _lookup(
        self, original: Any, table: Tensor, numbers: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        found = original(table, numbers, *args, **kwargs)
        if _C._current_graph_task_id() == -1:  # else the forward is run again in backward
            self._note(self._snapshots.look_up, table, numbers)
        return found

    def _note(self, note: Callable[[Tensor, Tensor], None], table: Tensor, seen: Tensor) -> None:
        try:
            with self._lock, torch.no_grad():
                unseen(note, table, seen)
        except Exception:  # noqa: BLE001 - boundary: user code must not see our failures
            self._snapshots.take_tables_whole()


def large_tables(modules: Iterable[nn.Module], everywhere: Iterable[nn.Module]) -> list[Tensor]:
    """The tables of these modules of which touched rows will do.

    None that another kind of module uses as well, as a tied head does, that shares its memory
    with another tensor, or that lookups write to (`max_norm`).
    """
    found: dict[int, Tensor] = {}
    for module in modules:
        table = module._parameters.get("weight") if isinstance(module, _KINDS) else None
        if table is None or parametrize.is_parametrized(module) or not is_plain(table):
            continue
        large = table.dim() == 2 and table.nbytes >= LARGE_BYTES
        if large and is_whole(table) and not (table.is_inference() or table.is_meta):
            found[table.untyped_storage()._cdata] = table
    for module in everywhere:
        for slots in (module._parameters, module._buffers):
            for tensor in slots.values():
                if isinstance(tensor, Tensor) and is_plain(tensor):
                    key = tensor.untyped_storage()._cdata
                    lookup = isinstance(module, _KINDS) and module.max_norm is None
                    if key in found and not (lookup and is_whole(tensor)):
                        del found[key]
    return list(found.values())
