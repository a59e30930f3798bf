"""An entry in a store -> its replay. Knows where the bytes are mapped from, and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from modulelens.rebuild import Payload
from modulelens.records import Metadata, TensorRef
from modulelens.replay import Replay
from modulelens.store import LocalStore


def replay_of(
    store: LocalStore,
    metadata: Metadata,
    allow: Iterable[str] = (),
    device: str = "cpu",
    class_map: Mapping[str, Any] | None = None,
) -> Replay:
    """The entry, ready to be brought to life; its bytes are read, and verified, when needed."""
    state: dict[str, torch.Tensor] = {}

    def storage(ref: TensorRef) -> torch.UntypedStorage:
        if ref.blob is None:
            if not state:
                state.update(store.state(metadata.id))
            return state[ref.key or ""].clone().untyped_storage()
        path = store.blob_path(ref.blob)
        size = path.stat().st_size
        # A private mapping: writes stay in this process, pages are read when they are touched.
        untyped: Any = torch.UntypedStorage
        made = untyped.from_file(str(path), False, size) if size else untyped(0)
        return made  # type: ignore[no-any-return]

    payload = Payload(metadata, store.blob_bytes, storage)
    roots = [store.root]
    return Replay(payload, device=device, allow=allow, class_map=class_map, refuse_roots=roots)
