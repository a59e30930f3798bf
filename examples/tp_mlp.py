"""A gated MLP in tensor parallel (`parallelize_module`) on two CPU ranks.

Trace both ranks, without touching this file:

    torchrun --nproc-per-node 2 -m modulelens trace --ranks all --repo lens -- examples/tp_mlp.py

Each rank stores its parts; the last one to store puts them together (`modulelens merge` does that
later, or elsewhere). The column-wise parts are exact by themselves; the whole is close: its sums
run in another order than the all-reduce's.

    modulelens ls --repo lens
    modulelens check MLP --repo lens
    python -c "import modulelens as ml; print(ml.Repo('lens')['MLP'].rebuild().down.weight.shape)"
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, HIDDEN, STEPS = 32, 128, 4


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)  # the same weights and batches on every rank
    model = MLP(WIDTH, HIDDEN)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"gate": columns, "up": columns, "down": rows})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(8, WIDTH)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
