"""One rank of a training whose tracing or whose life fails on one rank. See `test_faults.py`.

FAULT (environment): "tracer" (the tracer's own code raises on rank 0), "store" (storing raises),
"full" (rank 0 has no room for its first file), "fills" (nor rank 0 for its second entry's tensors,
rank 1 for its second entry's record), "killed" (rank 1 dies in the traced step), "script" (rank 0
raises after it), "leaves" (rank 0 exits with a code after it), "" (none).
"""

from __future__ import annotations

import datetime
import errno
import os
import signal
import stat
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.distributed.models import MLP
from torch import nn

FAULT = os.environ.get("FAULT", "")


def _raise(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


def _fill_up(where: str) -> None:
    """From the middle of one file on, nothing fits any more: what a full disk does to a write."""
    write, states, full = os.write, 0, False

    def until_full(file: int, data: bytes | memoryview) -> int:
        nonlocal states, full
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return write(file, data)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        is_state = Path(f"/proc/self/fd/{file}").readlink().name == "state.pt"
        states += is_state
        full = {"first": True, "state": states == 2, "record": states == 2 and not is_state}[where]
        return write(file, data[: len(data) // 2] if full else data)

    os.write = until_full


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
    rank = dist.get_rank()
    if rank == 0 and FAULT == "tracer":
        from modulelens.capture.nodes import Nodes
        from modulelens.capture.snapshot import Snapshots

        Nodes.note = _raise  # type: ignore[method-assign,assignment]
        Snapshots.ref = _raise  # type: ignore[method-assign,assignment]
    if rank == 0 and FAULT == "store":
        from modulelens.store import LocalStore

        LocalStore.put_blobs = _raise  # type: ignore[method-assign,assignment]
    room = {"full": ["first"], "fills": ["state", "record"]}.get(FAULT, [])
    if rank < len(room):
        _fill_up(room[rank])
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(MLP(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.full((2, 8), 0.1 * (step + rank))).square().mean()
        if FAULT == "killed" and step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and rank == 0:
            if FAULT == "script":
                raise ValueError("the script's own")
            if FAULT == "leaves":
                raise SystemExit(9)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(f"rank {rank} ends with {loss.item():.9f}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
