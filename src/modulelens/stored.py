"""An entry in a store -> its payload. Knows where the bytes are mapped from, and runs nothing."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from modulelens.errors import Corrupted
from modulelens.rebuild import Payload
from modulelens.rebuild.table import table_of
from modulelens.records import Metadata, TensorRef
from modulelens.store import LocalStore

_MOST_HELD_BYTES = 1 << 30
_held: dict[str, torch.Tensor] = {}


def hold(store: LocalStore, metadata: Metadata) -> None:
    """Reads the entry's blobs into memory that replays of this process, and its forks, share.

    What is written to is copied first. An entry of more than 1 GiB is not held.
    """
    if sum(metadata.blobs.values()) <= _MOST_HELD_BYTES:
        for digest in metadata.blobs:
            data = bytearray(store.blob_bytes(digest))
            if data:
                # Torch's own memory: other memory cannot be copied on write.
                _held[digest] = torch.frombuffer(data, dtype=torch.uint8).clone()


def payload_of(store: LocalStore, metadata: Metadata) -> Payload:
    """The entry's record and its bytes, which are read, and verified, when needed."""
    state: dict[str, torch.Tensor] = {}

    def raw(ref: TensorRef) -> torch.UntypedStorage:
        if ref.blob is None:
            if not state:
                state.update(store.state(metadata.id))
            return state[ref.key or ""].clone().untyped_storage()
        if ref.packed:
            return _unpacked(store.blob_bytes(ref.blob), ref.nbytes)
        if ref.blob in _held:
            return torch._lazy_clone(_held[ref.blob]).untyped_storage()
        path = store.blob_path(ref.blob)
        size = path.stat().st_size
        # A private mapping: writes stay in this process, pages are read when they are touched.
        untyped: Any = torch.UntypedStorage
        made = untyped.from_file(str(path), False, size) if size else untyped(0)
        return made  # type: ignore[no-any-return]

    def storage(ref: TensorRef) -> torch.UntypedStorage:
        return raw(ref) if ref.rows is None else table_of(ref, raw(ref))

    return Payload(metadata, store.blob_bytes, storage)


def _unpacked(data: bytes, nbytes: int) -> torch.UntypedStorage:
    """Compressed bytes as memory; never more than was recorded.

    Raises:
        Corrupted: They are not what was stored.
    """
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise Corrupted(f"a compressed blob cannot be read: {error}") from error
    if len(raw) != nbytes or not unpacker.eof:
        raise Corrupted(f"a compressed blob holds {len(raw):,} bytes or more, not {nbytes:,}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().untyped_storage()
