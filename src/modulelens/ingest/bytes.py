"""Snapshots -> stored bytes, and references that name them. Knows no modules and no entries."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import blake3
import msgspec
import torch
from torch import Tensor

from modulelens.capture.snapshot import Snapshot
from modulelens.records import Structure, TensorRef, ValueStats
from modulelens.tree import dtype_of
from modulelens.tree.stats import value_stats

_ALIGN = 64
_SMALL_BYTES = 64 << 10
_KEPT_INTEGERS = 1 << 16
_INTEGERS = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
)
NODES = -1


class BlobStore(Protocol):
    """Where bytes go."""

    def put_blobs(
        self,
        buffers: Sequence[Any],
        *,
        progress: Callable[[int], None] | None = None,
        wait: bool = True,
    ) -> list[str]:
        """Stores buffers, without `wait` in the background; returns their digests in order."""
        ...


class Bytes:
    """The bytes of one trace.

    `used` collects the blobs and `small` the tensors of `state.pt` that references made since
    they were last emptied need.

    Args:
        snapshots: The trace's snapshots.
        store: Where blobs go.
    """

    def __init__(self, snapshots: list[Snapshot], store: BlobStore) -> None:
        self._snapshots = snapshots
        self._store = store
        self._digests: dict[int, str] = {}
        self._owned: set[int] = set()
        self._queue: dict[str, Any] = {}
        self._stats: dict[tuple[Any, ...], ValueStats] = {}
        self.sizes: dict[str, int] = {}
        self.used: set[str] = set()
        self.small: dict[str, int] = {}

    def write(
        self, users: Mapping[int, set[int]], progress: Callable[[int], None] | None = None
    ) -> None:
        """Writes what is needed: snapshot number -> the captures that need it, `NODES` for nodes.

        A small snapshot that only one capture needs becomes a tensor of that entry's `state.pt`.
        """
        for number in users:
            self._snapshots[number].settle()
        self._owned = {
            number
            for number, who in users.items()
            if len(who) == 1 and NODES not in who and _size(self._snapshots[number]) <= _SMALL_BYTES
        }
        wanted = [number for number in users if number not in self._owned]
        buffers = [_view(self._snapshots[number]) for number in wanted]
        digests = self._store.put_blobs(buffers, progress=progress, wait=False)
        for number, digest in zip(wanted, digests, strict=True):
            self._digests[number] = digest
            self.sizes[digest] = _size(self._snapshots[number])

    def put(self, data: bytes) -> str:
        """Digest of a blob of its own, which `flush` stores."""
        digest = blake3.blake3(data).hexdigest()
        self._queue[digest] = data
        self.sizes[digest] = len(data)
        return digest

    def flush(self) -> None:
        """Stores what `put` queued: many small blobs in one go."""
        self._store.put_blobs(list(self._queue.values()), wait=False)
        self._queue.clear()

    def final(self, ref: TensorRef, keep: str) -> TensorRef:
        """The reference with the stored bytes' name; without bytes, statistics instead."""
        if ref.key is None:
            return ref
        number = int(ref.key[1:])
        snapshot = self._snapshots[number]
        if not keeps(ref, keep):
            return msgspec.structs.replace(ref, key=None, nbytes=0, stats=self._statistics(ref))
        size = _size(snapshot)
        offset = ref.offset - _low(snapshot) // dtype_of(ref.spec.dtype).itemsize
        if number in self._owned:
            self.small[f"t{number}"] = number
            return msgspec.structs.replace(ref, key=f"t{number}", offset=offset, nbytes=size)
        digest = self._digests.get(number) or self._late(number, snapshot)
        self.used.add(digest)
        return msgspec.structs.replace(ref, key=None, blob=digest, offset=offset, nbytes=size)

    def _statistics(self, ref: TensorRef) -> ValueStats:
        place = (ref.key, ref.offset, ref.spec.dtype, ref.spec.shape, ref.spec.stride)
        stats = self._stats.get(place)
        if stats is None:
            snapshot = self._snapshots[int((ref.key or "")[1:])]
            stats = self._stats[place] = value_stats(_as_tensor(ref, snapshot))
        return stats

    def size_of(self, numbers: Iterable[int]) -> int:
        """Bytes of these snapshots."""
        return sum(_size(self._snapshots[number]) for number in numbers)

    def _late(self, number: int, snapshot: Snapshot) -> str:
        # Random streams and constructor arguments get their references while storing.
        snapshot.settle()
        digest = self._digests[number] = self.put(_view(snapshot))
        self.sizes[digest] = _size(snapshot)
        return digest

    def state(self) -> dict[str, Tensor]:
        """The tensors of `state.pt` collected in `small`, as flat bytes."""
        return {key: _tensor(self._snapshots[number]) for key, number in self.small.items()}


def refs_in(value: Any) -> Iterator[TensorRef]:
    """All references to snapshots inside structures."""
    if isinstance(value, TensorRef):
        if value.key is not None:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from refs_in(item)


def note_users(users: dict[int, set[int]], value: Any, keep: str, who: int) -> None:
    """Adds `who` to the users of every snapshot in `value` whose bytes are kept."""
    for ref in refs_in(value):
        if keeps(ref, keep):
            users.setdefault(int((ref.key or "")[1:]), set()).add(who)


def keeps(ref: TensorRef, keep: str) -> bool:
    """Whether the bytes are kept: all under "full", small integers and bools under "shape"."""
    return keep == "full" or (ref.spec.dtype in _INTEGERS and ref.spec.numel <= _KEPT_INTEGERS)


def map_refs(
    value: Any,
    ref: Callable[[TensorRef], TensorRef],
    module: Callable[[int], Structure],
) -> Structure:
    """The structure with its references and its modules' numbers replaced."""
    if isinstance(value, TensorRef):
        return ref(value)
    if isinstance(value, list):
        return [map_refs(item, ref, module) for item in value]
    if not isinstance(value, dict):
        return value
    body = value.get("$module")
    if isinstance(body, dict) and "number" in body:
        return {"$module": module(body["number"])}
    return {key: map_refs(item, ref, module) for key, item in value.items()}


def union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    """All members of all sets."""
    return frozenset().union(*sets)


def _low(snapshot: Snapshot) -> int:
    return snapshot.extent[0] // _ALIGN * _ALIGN


def _size(snapshot: Snapshot) -> int:
    low, high = snapshot.extent
    return high - low // _ALIGN * _ALIGN


def _view(snapshot: Snapshot) -> Any:
    size = _size(snapshot)
    if not size:
        return b""
    # Through the address: asking torch for a writable buffer would copy pages that are shared.
    plain = torch.empty(0, dtype=torch.uint8).set_(snapshot.data)
    address: int = torch._C._data_address(plain)  # type: ignore[attr-defined]
    start = address + _low(snapshot) - snapshot.start
    return memoryview((ctypes.c_ubyte * size).from_address(start)).cast("B")


def _tensor(snapshot: Snapshot) -> Tensor:
    size = _size(snapshot)
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(_view(snapshot)), dtype=torch.uint8)


def _as_tensor(ref: TensorRef, snapshot: Snapshot) -> Tensor:
    dtype = dtype_of(ref.spec.dtype)
    offset = ref.offset - snapshot.start // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(snapshot.data, offset, ref.spec.shape, ref.spec.stride)
