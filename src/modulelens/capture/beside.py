"""Copies weights on a thread beside the step, so that the optimizer need not wait for it.

A snapshot shares the weights' pages; the optimizer's first write to each would copy them on the
training thread. Copied here while forward and backward run, the pages are given back right before
the optimizer writes. What is not copied in time is copied by torch at the write: slower, never
wrong. Knows snapshots, no modules.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

import torch

from modulelens.capture.snapshot import Snapshot

_CHUNK_BYTES = 8 << 20
_WORTHWHILE_BYTES = 256 << 10


class Beside:
    """Copies snapshots that share their pages; `give_back` swaps in what is done."""

    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        self._waiting = [s for s in snapshots if s.shared and s.nbytes >= _WORTHWHILE_BYTES]
        self._done: list[tuple[Snapshot, torch.UntypedStorage]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="modulelens-copy", daemon=True)
        if self._waiting:
            self._thread.start()

    def give_back(self) -> list[Snapshot]:
        """Ends copying; the snapshots that own their bytes from now on."""
        self.end()
        owned = []
        for snapshot, data in self._done:
            snapshot.data, snapshot.shared = data, False
            owned.append(snapshot)
        self._done.clear()
        return owned

    def end(self) -> None:
        """Stops the thread at the next chunk."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        for snapshot in self._waiting:
            # Through addresses: reading a shared page so leaves it shared, and ctypes lets the
            # training thread run meanwhile.
            source = torch.empty(0, dtype=torch.uint8).set_(snapshot.data)
            start: int = torch._C._data_address(source)  # type: ignore[attr-defined]
            data = torch.UntypedStorage(snapshot.nbytes)
            target = data.data_ptr()
            for offset in range(0, snapshot.nbytes, _CHUNK_BYTES):
                if self._ended.is_set():
                    return
                size = min(_CHUNK_BYTES, snapshot.nbytes - offset)
                ctypes.memmove(target + offset, start + offset, size)
            self._done.append((snapshot, data))
