"""Snapshots -> stored bytes, and references that name them. Knows no modules and no entries."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import blake3
import msgspec
import torch
from torch import Tensor

from modulelens.capture.snapshot import Snapshot
from modulelens.records import Structure, TensorRef, ValueStats
from modulelens.tree import dtype_of
from modulelens.tree.stats import few_valued, value_stats

_ALIGN = 64
_SMALL_BYTES = 64 << 10
#: Integers of at most this size are kept by value also where only shapes are kept.
_KEPT_BYTES = 512 << 10
#: So are larger ones, and masks of any dtype, that take no more than this when compressed.
_PACKED_BYTES = 4 << 20
#: Values whose integer parts mean nothing without each other, or hold other values' bytes.
_WHOLE = frozenset({"$sparse", "$compressed", "$subclass", "$ndarray"})
_NESTED = (TensorRef, list, dict)
_CHUNK = 1 << 20
_INTEGERS = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
)
_FLOATS = ("float8", "float16", "float32", "float64", "bfloat16", "complex")
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
        self._packed: dict[int, str | None] = {}
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

    def final(self, ref: TensorRef, keep: str, part: bool = False) -> TensorRef:
        """The reference with the stored bytes' name; without bytes, statistics instead.

        Bytes that are stored anyway, for another module or as weights, are named in any case.
        """
        if ref.key is None:
            return ref
        number = int(ref.key[1:])
        snapshot = self._snapshots[number]
        size = _size(snapshot)
        low = _low(snapshot) // dtype_of(ref.spec.dtype).itemsize
        offset = max(ref.offset - low, 0)  # an empty tensor may lie in front of all that is shown
        rows = None if snapshot.rows is None else snapshot.rows.count
        placed = msgspec.structs.replace(ref, key=None, offset=offset, nbytes=size, rows=rows)
        if not self._keeps(ref, keep, part) and number not in self._digests:
            packed = self._pack(ref, snapshot)
            if packed is None:
                return msgspec.structs.replace(placed, rows=None, stats=self._statistics(ref))
            self.used.add(packed)
            return msgspec.structs.replace(placed, blob=packed, packed=True)
        if number in self._owned:
            self.small[f"t{number}"] = number
            return msgspec.structs.replace(placed, key=f"t{number}")
        digest = self._digests.get(number) or self._late(number, snapshot)
        self.used.add(digest)
        return msgspec.structs.replace(placed, blob=digest)

    def _keeps(self, ref: TensorRef, keep: str, part: bool) -> bool:
        """Whether the bytes are kept: all under "full", those of small integers under "shape".

        Also of dtypes that torch does not count with: bits, and parts of a byte.
        """
        dtype = ref.spec.dtype
        if keep == "full" or dtype.startswith(_FLOATS):
            return keep == "full"
        small = _size(self._snapshots[int((ref.key or "")[1:])]) <= _KEPT_BYTES
        return part or small or dtype not in _INTEGERS

    def _pack(self, ref: TensorRef, snapshot: Snapshot) -> str | None:
        """Digest of the compressed bytes of indices or of a mask, None where they are too many."""
        number = snapshot.number
        if number not in self._packed:
            snapshot.settle()
            fits = ref.spec.dtype in _INTEGERS or few_valued(_as_tensor(ref, snapshot))
            fits = fits and snapshot.rows is None  # else values of other rows are not known
            data = _compressed(_view(snapshot)) if fits else None
            self._packed[number] = None if data is None else self.put(data)
        return self._packed[number]

    def _statistics(self, ref: TensorRef) -> ValueStats:
        place = (ref.key, ref.offset, ref.spec.dtype, ref.spec.shape, ref.spec.stride)
        stats = self._stats.get(place)
        if stats is None:
            snapshot = self._snapshots[int((ref.key or "")[1:])]
            stats = self._stats[place] = value_stats(_as_tensor(ref, snapshot))
        return stats

    def note_users(self, users: dict[int, set[int]], value: Any, keep: str, who: int) -> None:
        """Adds `who` to the users of every snapshot in `value` whose bytes are kept."""
        for ref, part in refs_in(value):
            if self._keeps(ref, keep, part):
                users.setdefault(int((ref.key or "")[1:]), set()).add(who)

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


def refs_in(value: Any, part: bool = False) -> Iterator[tuple[TensorRef, bool]]:
    """All references to snapshots inside structures, and whether each is a part of a tensor."""
    if isinstance(value, TensorRef):
        if value.key is not None:
            yield value, part
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item, part)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from refs_in(item, part or key in _WHOLE)


def map_refs(
    value: Any,
    ref: Callable[[TensorRef, bool], TensorRef],
    module: Callable[[int], Structure],
    part: bool = False,
) -> Structure:
    """The structure with its references and its modules' numbers replaced."""
    if isinstance(value, TensorRef):
        return ref(value, part)
    if isinstance(value, list):
        # A random stream is a list of 625 numbers.
        return [
            map_refs(item, ref, module, part) if isinstance(item, _NESTED) else item
            for item in value
        ]
    if not isinstance(value, dict):
        return value
    body = value.get("$module")
    if isinstance(body, dict) and "number" in body:
        return {"$module": module(body["number"])}
    return {k: map_refs(v, ref, module, part or k in _WHOLE) for k, v in value.items()}


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


def _compressed(raw: Any) -> bytes | None:
    packer, parts, left = zlib.compressobj(1), [], _PACKED_BYTES
    for start in range(0, len(raw), _CHUNK):
        parts.append(packer.compress(raw[start : start + _CHUNK]))
        left -= len(parts[-1])
        if left < 0:
            return None
    return b"".join((*parts, packer.flush()))


def _tensor(snapshot: Snapshot) -> Tensor:
    size = _size(snapshot)
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(_view(snapshot)), dtype=torch.uint8)


def _as_tensor(ref: TensorRef, snapshot: Snapshot) -> Tensor:
    dtype = dtype_of(ref.spec.dtype)
    offset = ref.offset - snapshot.start // dtype.itemsize
    if snapshot.rows is not None:
        shape = (snapshot.rows.count, *ref.spec.shape[1:])
        return torch.empty(0, dtype=dtype).set_(snapshot.data, 0, shape, ref.spec.stride)
    return torch.empty(0, dtype=dtype).set_(snapshot.data, offset, ref.spec.shape, ref.spec.stride)
