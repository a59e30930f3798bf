"""References -> live tensors. Tensors that shared memory share it again, all others do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modulelens.errors import Corrupted, EnvironmentLacks, NotRebuildable, UsageError
from modulelens.records import TensorRef
from modulelens.tree import as_non_leaf, dtype_of

Fill = Callable[[TensorRef, Tensor], None]
_MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(eq=False)
class Tensors:
    """Makes tensors of one session.

    Args:
        storage: A reference -> new memory with its bytes; called once per alias group.
        device: Where the tensors are made.
        missing: Fills a tensor whose bytes were not kept, given its reference; None refuses.
    """

    storage: Callable[[TensorRef], torch.UntypedStorage]
    device: str = "cpu"
    missing: Fill | None = None
    _memory: dict[tuple[int, str], torch.UntypedStorage] = field(default_factory=dict, init=False)
    _objects: dict[int, Tensor] = field(default_factory=dict, init=False)
    _filled: dict[int, list[tuple[int, int]]] = field(default_factory=dict, init=False)

    def get(self, ref: TensorRef) -> Tensor:
        """The tensor; the same object for references of the same tensor object.

        One that required grad and was no leaf is made plain: it is an attribute of a module.

        Raises:
            Corrupted: The reference points outside its bytes.
            NotRebuildable: Its bytes were not kept, and nothing stands in for them.
        """
        found = self._objects.get(ref.object)
        return self._adopt(ref.object, self._make(ref)) if found is None else found

    def get_input(self, ref: TensorRef) -> Tensor:
        """As `get`, but a non-leaf that required grad has a history and may be changed in place."""
        made = self.get(ref)
        if ref.spec.requires_grad and not ref.leaf and made.is_leaf and not made.requires_grad:
            made = self._adopt(ref.object, as_non_leaf(made.requires_grad_()))
        return made

    def _adopt(self, number: int, tensor: Tensor) -> Tensor:
        if number >= 0:
            self._objects[number] = tensor
        return tensor

    def _make(self, ref: TensorRef) -> Tensor:
        dtype = dtype_of(ref.spec.dtype)
        if ref.spec.device == "meta" or (ref.group < 0 and not ref.kept):
            made = torch.empty_strided(ref.spec.shape, ref.spec.stride, dtype=dtype, device="meta")
        elif ref.kept:
            made = torch.empty(0, dtype=dtype, device=self.device)
            made.set_(self._group(ref, dtype), ref.offset, ref.spec.shape, ref.spec.stride)
            _check_room(ref, dtype)  # an expanded one grows when it is copied
        elif self.missing is not None:
            _check_room(ref, dtype)
            made = self._stand_in(ref, dtype, self.missing)
        else:
            raise NotRebuildable("only the shape of a tensor was kept here", reason="not_kept")
        made = torch._conj(made) if ref.conj else made
        made = torch._neg_view(made) if ref.neg else made
        return made.requires_grad_() if ref.spec.requires_grad and ref.leaf else made

    def _stand_in(self, ref: TensorRef, dtype: torch.dtype, fill: Fill) -> Tensor:
        """A tensor of made-up values; what shared memory shares it, and is filled once."""
        low, high = _extent(ref, dtype)
        place = (ref.group, "")
        memory = self._memory.get(place)
        if memory is None or memory.nbytes() < high:
            memory = self._memory[place] = new_memory(max(high, ref.nbytes), self.device)
            self._filled[ref.group] = []
        made = torch.empty(0, dtype=dtype, device=self.device)
        made.set_(memory, ref.offset, ref.spec.shape, ref.spec.stride)
        filled = self._filled[ref.group]
        if made.numel() and not any(start <= low and high <= end for start, end in filled):
            fill(ref, made)
            if made.numel() * dtype.itemsize == high - low:
                filled.append((low, high))
        return made

    def _group(self, ref: TensorRef, dtype: torch.dtype) -> torch.UntypedStorage:
        place = (ref.group, ref.blob or ref.key or "")
        memory = self._memory.get(place)
        if memory is None:
            memory = self.storage(ref)
            if self.device != "cpu":
                plain = torch.empty(0, dtype=torch.uint8).set_(memory)
                memory = plain.to(self.device).untyped_storage()
            self._memory[place] = memory
        if _extent(ref, dtype)[1] > memory.nbytes():
            raise _outside(ref, memory.nbytes())
        return memory


def _extent(ref: TensorRef, dtype: torch.dtype) -> tuple[int, int]:
    """The first byte that the tensor shows of its memory, and the one behind the last."""
    shape, stride = ref.spec.shape, ref.spec.stride
    if len(shape) != len(stride) or ref.offset < 0 or min((*shape, *stride), default=0) < 0:
        raise _outside(ref, ref.nbytes)
    if 0 in shape:
        return 0, 0
    last = ref.offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return ref.offset * dtype.itemsize, (last + 1) * dtype.itemsize


def _outside(ref: TensorRef, nbytes: int) -> Corrupted:
    return Corrupted(f"a tensor of shape {list(ref.spec.shape)} points outside its {nbytes} bytes")


def new_memory(nbytes: int, device: str = "cpu") -> torch.UntypedStorage:
    """Memory for what was not kept.

    Raises:
        NotRebuildable: There is not so much.
    """
    try:
        made: torch.UntypedStorage = torch.UntypedStorage(nbytes, device=device)
    except RuntimeError as error:
        text = f"{nbytes:,} bytes that were not kept do not fit into memory"
        raise NotRebuildable(text, reason="not_kept") from error
    return made


def usable_device(device: str | torch.device) -> str:
    """The device's name, once a tensor could be made there.

    Raises:
        UsageError: Torch knows no such device.
        EnvironmentLacks: This machine, or this torch, has none.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{device!r} is no device", hint="such as 'cpu' or 'cuda:0'") from error
    try:
        torch.empty(0, device=place)
    except Exception as error:  # boundary: each backend has an error of its own
        told = str(error).partition(". ")[0].partition("\n")[0]
        text = f"device {str(place)!r} cannot be used here: {told}"
        raise EnvironmentLacks(text, hint="`modulelens doctor` says which can") from error
    return str(place)


def _check_room(ref: TensorRef, dtype: torch.dtype) -> None:
    nbytes = ref.spec.numel * dtype.itemsize
    if nbytes > _MEMORY_BYTES:
        raise NotRebuildable(
            f"a tensor of {nbytes:,} bytes is larger than this machine's memory", reason="not_kept"
        )
