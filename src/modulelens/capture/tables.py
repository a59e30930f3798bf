"""Rows that were taken of an embedding table. Knows tables, no lookups and no disk."""

from __future__ import annotations

import torch
from torch import Tensor

#: Smaller tables are kept whole.
LARGE_BYTES = 1 << 20
_PROBES = 1000


class Rows:
    """The rows that were looked up of one table while its values stayed what they are.

    Args:
        table: Of shape (rows, width).
    """

    def __init__(self, table: Tensor) -> None:
        self._seen = torch.zeros(len(table), dtype=torch.bool, device=table.device)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self.count = 0
        self.total = len(table)

    @property
    def numbers(self) -> Tensor:
        """The numbers of the rows, int64."""
        return torch.cat([self._seen.new_empty(0, dtype=torch.long), *(n for n, _ in self._parts)])

    def add(self, table: Tensor, numbers: Tensor) -> None:
        """Takes those rows that were not taken yet."""
        numbers = numbers.detach().reshape(-1).long()
        new = numbers[~self._seen[numbers]].unique()
        if new.numel():
            self._seen[new] = True
            self._parts.append((new, table.detach().index_select(0, new)))
            self.count += new.numel()

    def same(self, table: Tensor) -> bool:
        """Whether the rows that were taken are still what the table holds, bit by bit."""
        live = ((rows, table.detach().index_select(0, n)) for n, rows in self._parts)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in live)

    def used_otherwise(self, gradient: Tensor) -> bool:
        """Whether a row that was not looked up got a gradient, as from a head; looks at a few."""
        some = torch.arange(0, self.total, max(1, self.total // _PROBES), device=gradient.device)
        others = some[~self._seen[some]]
        return not gradient.is_sparse and bool(gradient.index_select(0, others).any())

    def packed(self) -> torch.UntypedStorage:
        """On the CPU: the rows, in the order of their numbers, and behind them the numbers.

        Asked for once, when no row will be added any more.
        """
        numbers, order = self.numbers.cpu().sort()
        rows = [part.cpu() for _, part in self._parts]
        parts = [torch.cat(rows)[order].view(torch.uint8).reshape(-1)] if rows else []
        self._parts.clear()
        return torch.cat([*parts, numbers.view(torch.uint8)]).untyped_storage()


def is_whole(tensor: Tensor) -> bool:
    """Whether it shows all of its storage, in its order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
