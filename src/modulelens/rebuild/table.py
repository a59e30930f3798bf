"""Kept rows of a table -> the whole table, whose other rows are zeros that take no memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

import torch

from modulelens.errors import Corrupted
from modulelens.rebuild.tensors import new_memory
from modulelens.records import TensorRef
from modulelens.tree import dtype_of


def table_of(ref: TensorRef, kept: torch.UntypedStorage) -> torch.UntypedStorage:
    """Memory of the whole table, with the kept rows in their places.

    Args:
        ref: Of a contiguous table of shape (rows, width) of which `ref.rows` rows were kept.
        kept: Their bytes, and behind them their numbers.

    Raises:
        Corrupted: The bytes are not those of so many rows of this table.
        NotRebuildable: The whole table cannot be made here.
    """
    numbers, rows = rows_in(ref, kept)
    total, size = ref.spec.shape[0], rows.shape[1]
    made = zeros(total * size)
    table = torch.empty(0, dtype=torch.uint8).set_(made, 0, (total, size), (size, 1))
    table[numbers] = rows
    return made


def rows_in(ref: TensorRef, kept: torch.UntypedStorage) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the kept rows, and their bytes, of shape (rows, bytes of one).

    Raises:
        Corrupted: As `table_of`.
    """
    dtype, count, (total, *width) = dtype_of(ref.spec.dtype), ref.rows or 0, ref.spec.shape
    size = math.prod(width) * dtype.itemsize
    if min(count, total, *width) < 0 or kept.nbytes() != count * (size + 8):
        raise Corrupted(f"{kept.nbytes():,} bytes are not {count:,} rows of {size:,} bytes")
    plain = torch.empty(0, dtype=torch.uint8).set_(kept)
    numbers = plain[count * size :].clone().view(torch.int64)
    if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < total:
        raise Corrupted(f"a row's number is outside the {total:,} rows of its table")
    return numbers, plain[: count * size].view(count, size)


def zeros(nbytes: int) -> torch.UntypedStorage:
    """Zeroed memory of torch's own, which the system provides page by page when it is touched.

    `torch.zeros` writes all of it at once; numpy's lazy zeros are none that torch can share.
    """
    made = new_memory(nbytes)
    plain = torch.empty(0, dtype=torch.uint8).set_(made)
    start = made.data_ptr()
    low, high = -start % mmap.PAGESIZE, nbytes - (start + nbytes) % mmap.PAGESIZE
    if sys.platform != "linux" or high <= low or _drop(start + low, high - low):
        low, high = nbytes, nbytes
    plain[:low].zero_()
    plain[high:].zero_()
    return made


def _drop(address: int, nbytes: int) -> int:
    """Gives whole pages back; Linux promises zeros at the next touch. 0: done."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(advise(address, nbytes, mmap.MADV_DONTNEED))
