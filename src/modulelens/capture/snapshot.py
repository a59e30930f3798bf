"""Storages as they are at one moment, without copying where torch can share pages.

Knows tensors and storages; knows no modules and no disk. A snapshot is taken per storage, so
tensors that share memory share their snapshot. While a snapshot lives, its memory belongs to
nobody else: the same address with the same size is the same bytes, also across versions.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from modulelens.capture.tables import Rows, is_whole
from modulelens.errors import NotRebuildable
from modulelens.records import TensorRef
from modulelens.tree import dtype_of, spec_of

_C: Any = torch._C
_lazy_clone: Any = getattr(torch, "_lazy_clone", None)
#: Storages larger than this, of which a tensor shows a small part, are copied only in that part.
_LARGE_BYTES = 64 << 20


@dataclasses.dataclass(eq=False, slots=True)
class Snapshot:
    """One storage as it was. `data` is on the CPU once `settle` ran.

    `shown` are references of tensors that lie in it, until `extent` took them; `start` is where
    `data` begins in the original storage (0 unless only a part was copied). `version` is torch's
    write counter, which is what tells a write where bytes can't be compared: on an accelerator, and
    of a table of which only `rows` are taken. `held` shares such a table while the forward runs, so
    that no write goes unseen.
    """

    number: int
    group: int
    base: int
    nbytes: int
    data: torch.UntypedStorage
    shared: bool = False
    version: int = -1
    retired: bool = False
    start: int = 0
    pending: Any = None
    rows: Rows | None = None
    held: torch.UntypedStorage | None = None
    shown: list[TensorRef] = dataclasses.field(default_factory=list)
    _extent: tuple[int, int] = (0, 0)

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes that some tensor showed, or of the rows: from, to. (0, 0): none."""
        if self.rows is not None:
            return 0, self.data.nbytes()
        while self.shown:
            ref = self.shown.pop()
            itemsize = dtype_of(ref.spec.dtype).itemsize
            low, high = _bounds(ref.offset, ref.spec.shape, ref.spec.stride, itemsize)
            before = self._extent if self._extent[1] else (low, high)
            if ref.spec.numel:
                self._extent = min(low, before[0]), max(high, before[1])
        return self._extent

    def settle(self) -> None:
        """Waits for the copy from an accelerator, if there was one."""
        if self.pending is not None:
            self.pending.synchronize()
            self.pending = None
        if self.rows is not None and not self.data.nbytes():
            self.data = self.rows.packed()


class _Met(NamedTuple):
    """A live tensor and its last reference."""

    tensor: weakref.ref[Tensor]
    ref: TensorRef
    snapshot: Snapshot


class Snapshots:
    """Takes snapshots and gives tensors their references.

    References name a snapshot as `key = "s<number>"`; storing replaces that by a digest.
    """

    def __init__(self) -> None:
        self.taken: list[Snapshot] = []
        self.copied = 0
        self._latest: dict[int, tuple[weakref.ref[Any], Snapshot]] = {}
        self._by_place: dict[tuple[int, int], Snapshot] = {}
        self._met: dict[int, _Met] = {}
        self._object_count = 0
        self._group_count = 0
        self._never_shared: dict[int, torch.UntypedStorage] = {}
        self._side_streams: dict[torch.device, Any] = {}
        self._tables: dict[int, Tensor] = {}
        self._holding = False

    def ref(self, tensor: Tensor) -> TensorRef:
        """The tensor's reference; takes a snapshot of its storage unless there is a current one.

        Raises:
            NotRebuildable: Its memory was freed, as sharding frameworks do.
        """
        if tensor.is_meta:  # it has no bytes, and is made anew without any
            return TensorRef(spec=spec_of(tensor), group=-1, leaf=tensor.is_leaf)
        met = self._met.get(id(tensor))
        if met is not None and met.tensor() is tensor:
            if self._current(tensor, met):
                return met.ref
            number = met.ref.object
        else:
            number = self._object_count
            self._object_count += 1
        snapshot = self._snapshot(tensor)
        ref = _new_ref(tensor, snapshot, number)
        self._met[id(tensor)] = _Met(weakref.ref(tensor), ref, snapshot)
        return ref

    def changed(self, tensor: Tensor, ref: TensorRef) -> bool:
        """Whether the tensor is no longer what it was when `ref` was made."""
        if ref.key is None:
            return False
        snapshot = self.taken[int(ref.key[1:])]
        unwritten = snapshot.shared and _base(tensor) == snapshot.base
        return not _fits(tensor, ref) or not (unwritten or self._same_bytes(tensor, snapshot))

    def touched(self, tensor: Tensor) -> bool:
        """Whether the tensor was changed since its last reference, or never had one."""
        met = self._met.get(id(tensor))
        return met is None or met.tensor() is not tensor or not self._current(tensor, met)

    def never_share(self, tensor: Tensor) -> None:
        """From now on copies this tensor's storage instead of sharing its pages.

        Needed for storages that a kernel writes to inside a parallel region, where torch refuses
        to copy a shared page (`ctc_loss`'s backward).
        """
        if tensor.device.type == "cpu":
            tensor.data_ptr()  # un-shares it if it is shared already
            self._never_shared[_C._storage_address(tensor)] = tensor.untyped_storage()

    def watch_tables(self, tables: Iterable[Tensor]) -> None:
        """From now on takes of these the rows that `look_up` names; what was taken is retired."""
        self._tables = {_C._storage_address(table): table for table in tables}
        self._holding = True
        self.retire([snapshot for snapshot in self.taken if snapshot.rows is not None])

    def release_tables(self) -> None:
        """Lets go of their pages, which the optimizer would have to copy.

        Of a table that was written to meanwhile all is kept, before and after: the write left the
        old pages to the snapshot.
        """
        self._holding = False
        places, written = {_base(table) for table in self._tables.values()}, set()
        for snapshot in self.taken:
            if snapshot.held is not None and snapshot.base not in places:
                snapshot.data, snapshot.shared, snapshot.rows = snapshot.held, True, None
                written.add(snapshot.group)
            snapshot.held = None
        for table in list(self._tables.values()) if written else ():
            latest = self._by_place.get((_base(table), table.nbytes))
            if latest is not None and latest.rows is not None and latest.group in written:
                self._take_whole(table, latest)

    def look_up(self, table: Tensor, numbers: Tensor) -> None:
        """Takes rows of a watched table; all of it when they are more than half."""
        if _C._storage_address(table) not in self._tables:
            return
        snapshot = self._snapshot(table)
        if snapshot.rows is not None:
            snapshot.rows.add(table, numbers)
            if 2 * snapshot.rows.count > snapshot.rows.total:
                self._take_whole(table, snapshot)

    def look_back(self, table: Tensor, gradient: Tensor) -> None:
        """Takes all of a watched table when a row that was not looked up got a gradient."""
        known = self._by_place.get((_base(table), table.nbytes))
        if known is None or known.rows is None or known.version != _version(table):
            return
        if gradient.shape == table.shape and known.rows.used_otherwise(gradient):
            self._take_whole(table, known)

    def take_tables_whole(self) -> None:
        """Takes all of every watched table."""
        for table in list(self._tables.values()):
            self._take_whole(table, self._snapshot(table))

    def rows_like(self, table: Tensor, gradient: Tensor) -> TensorRef:
        """A dense gradient's reference: of the rows that were looked up, others being zero."""
        known = self._by_place.get((_base(table), table.nbytes))
        alike = gradient.shape == table.shape and is_whole(gradient)
        if known is None or known.rows is None or not alike or known.version != _version(table):
            return self.ref(gradient)
        rows = Rows(gradient)
        rows.add(gradient, known.rows.numbers)
        return self.rows_of(gradient, rows)

    def rows_of(self, table: Tensor, rows: Rows) -> TensorRef:
        """The reference of rows that are taken of a table, also later on."""
        snapshot = self._add(table, -1, self._new_group(), torch.UntypedStorage(0), rows=rows)
        return msgspec.structs.replace(_new_ref(table, snapshot, -1), offset=0)

    def retire(self, snapshots: Iterable[Snapshot]) -> None:
        """These are not met again: their memory is the live tensors' own from now on."""
        for snapshot in snapshots:
            snapshot.retired = True
            self._by_place.pop((snapshot.base, snapshot.nbytes), None)

    def forget_live(self) -> None:
        """Drops all that refers to live tensors. Snapshots taken so far stay valid."""
        for snapshot in self.taken:
            if snapshot.rows is not None:
                snapshot.settle()
        self._tables.clear()
        self._latest.clear()
        self._by_place.clear()
        self._met.clear()
        self._never_shared.clear()

    def _current(self, tensor: Tensor, met: _Met) -> bool:
        snapshot = met.snapshot
        if snapshot.retired or not _fits(tensor, met.ref):
            return False
        # A kernel may have taken shared pages for itself and written nothing: sharing them anew
        # is cheap, comparing them each time is not.
        if snapshot.shared:
            return _base(tensor) == snapshot.base
        return self._same_bytes(tensor, snapshot)

    def _snapshot(self, tensor: Tensor) -> Snapshot:
        address = _C._storage_address(tensor)
        storage = tensor.untyped_storage()
        base, nbytes = _base(tensor), storage.nbytes()
        known = self._latest.get(address)
        same_storage = known is not None and known[0]() is storage
        found = self._by_place.get((base, nbytes)) if nbytes else None
        if found is not None and (
            found.shared or (same_storage and self._same_bytes(tensor, found))
        ):
            if found.rows is not None and not is_whole(tensor):
                self._take_whole(tensor, found)
            return found
        group = known[1].group if same_storage and known else self._new_group()
        snapshot = self._take(tensor, storage, base, group)
        self._latest[address] = (weakref.ref(storage), snapshot)
        self._by_place[base, nbytes] = snapshot
        return snapshot

    def _new_group(self) -> int:
        self._group_count += 1
        return self._group_count - 1

    def _take(
        self, tensor: Tensor, storage: torch.UntypedStorage, base: int, group: int
    ) -> Snapshot:
        start, shared, pending, rows, held = 0, False, None, None, None
        data: torch.UntypedStorage
        if _extent(tensor)[1] > storage.nbytes():
            raise NotRebuildable("its memory was freed", reason="not_kept")
        if _C._storage_address(tensor) in self._tables and is_whole(tensor):
            data, rows = torch.UntypedStorage(0), Rows(tensor)
            held = _share(tensor) if self._holding and tensor.is_cpu else None
        elif not tensor.is_cpu:
            data, pending = self._from_device(storage)
        elif storage.nbytes() == 0:
            data, shared = torch.UntypedStorage(0), True
        else:
            lazily = None if _C._storage_address(tensor) in self._never_shared else _share(tensor)
            shared = lazily is not None
            data, start = (lazily, 0) if lazily is not None else _copy(tensor, storage)
            self.copied += not shared
        more = {"start": start, "shared": shared, "pending": pending, "rows": rows, "held": held}
        return self._add(tensor, base, group, data, **more)

    def _add(
        self, tensor: Tensor, base: int, group: int, data: torch.UntypedStorage, **more: Any
    ) -> Snapshot:
        number, nbytes = len(self.taken), tensor.untyped_storage().nbytes()
        version = _version(tensor)
        snapshot = Snapshot(number, group, base, nbytes, data, version=version, **more)
        self.taken.append(snapshot)
        return snapshot

    def _take_whole(self, table: Tensor, snapshot: Snapshot) -> None:
        """All of a table of which rows were taken; it is still what it was then."""
        self._tables.pop(_C._storage_address(table), None)
        whole = self._take(table, table.untyped_storage(), snapshot.base, snapshot.group)
        self.taken.remove(whole)
        snapshot.data, snapshot.start, snapshot.shared = whole.data, whole.start, whole.shared
        snapshot.pending, snapshot.rows, snapshot.held = whole.pending, None, None

    def _from_device(self, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Any]:
        # A device-side copy is ordered with the step's own kernels; the slow way to the host runs
        # beside them on a side stream, into pinned memory.
        device: Any = storage.device
        live = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        copy = live.clone()
        if device.type != "cuda":
            return copy.cpu().untyped_storage(), None
        stream = self._side_streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host = torch.empty(copy.numel(), dtype=torch.uint8, pin_memory=True)
            host.copy_(copy, non_blocking=True)
            copy.record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        return host.untyped_storage(), event

    def _same_bytes(self, tensor: Tensor, snapshot: Snapshot) -> bool:
        storage = tensor.untyped_storage()
        if storage.nbytes() != snapshot.nbytes:
            return False
        if not tensor.is_cpu or snapshot.rows is not None:
            same = _base(tensor) == snapshot.base and snapshot.version == _version(tensor) >= 0
            looked_up = None if self._holding else snapshot.rows
            return same and (looked_up is None or looked_up.same(tensor))
        low, high = _extent(tensor)
        if low < snapshot.start or high > snapshot.start + snapshot.data.nbytes():
            return False
        live = torch.empty(0, dtype=torch.uint8).set_(storage)[low:high]
        kept = torch.empty(0, dtype=torch.uint8).set_(snapshot.data)
        return torch.equal(live, kept[low - snapshot.start : high - snapshot.start])


def _new_ref(tensor: Tensor, snapshot: Snapshot, number: int) -> TensorRef:
    ref = TensorRef(
        spec=spec_of(tensor),
        group=snapshot.group,
        object=number,
        offset=int(tensor.storage_offset()),
        nbytes=snapshot.nbytes,
        key=f"s{snapshot.number}",
        leaf=tensor.is_leaf,
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )
    snapshot.shown.append(ref)
    return ref


def _fits(tensor: Tensor, ref: TensorRef) -> bool:
    spec = ref.spec
    return (
        spec.shape == tensor.shape
        and spec.requires_grad == tensor.requires_grad
        and spec.stride == tensor.stride()
        and ref.leaf == tensor.is_leaf
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _base(tensor: Tensor) -> int:
    """Where the storage begins, wherever in it the tensor does; reading it un-shares nothing."""
    address: int = _C._data_address(tensor)
    return address


def _bounds(offset: int, shape: Any, stride: Any, itemsize: int) -> tuple[int, int]:
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return offset * itemsize, (last + 1) * itemsize


def _extent(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    offset = int(tensor.storage_offset())
    return _bounds(offset, tensor.shape, tensor.stride(), tensor.itemsize)


def _share(tensor: Tensor) -> torch.UntypedStorage | None:
    live = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():  # cloned, they would be computed
        live = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    try:
        # The clone has all of the storage, whatever part of it the tensor shows.
        return _lazy_clone(live).untyped_storage()  # type: ignore[no-any-return]
    # An older torch; memory that torch did not allocate: numpy, mmap, shm.
    except (TypeError, RuntimeError):
        return None


def _copy(tensor: Tensor, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, int]:
    low, high = _extent(tensor)
    if storage.nbytes() <= _LARGE_BYTES or 2 * (high - low) > storage.nbytes():
        low, high = 0, storage.nbytes()
    live = torch.empty(0, dtype=torch.uint8).set_(storage)[low:high]
    return live.clone().untyped_storage(), low
