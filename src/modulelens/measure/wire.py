"""Messages through a pipe: four bytes of length, then that many bytes."""

from __future__ import annotations

import os

_HEAD = 4


def send(pipe: int, data: bytes) -> None:
    """Writes one message."""
    view = memoryview(len(data).to_bytes(_HEAD, "big") + data)
    while view:
        view = view[os.write(pipe, view) :]


def receive(pipe: int) -> bytes | None:
    """Reads one message; None where the other end is gone."""
    head = _exactly(pipe, _HEAD)
    return None if head is None else _exactly(pipe, int.from_bytes(head, "big"))


def _exactly(pipe: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(pipe, min(count - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
