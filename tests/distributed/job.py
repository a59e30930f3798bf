"""One rank of a job that trains a model in several ways, untraced and traced.

    torchrun --nproc-per-node 2 job.py FOLDER WAY...

Leaves one repo per way in FOLDER, and `<way>.<rank>.json` with what both trainings printed.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.counting import collectives
from tests.distributed.models import Decoder, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import modulelens as ml

TRACED = 1  # the step


def ddp(model: Decoder) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: Decoder, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_kept(model: Decoder) -> nn.Module:
    return fsdp(model, reshard_after_forward=False)


def fsdp_mixed(model: Decoder) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(model, mp_policy=half)


def fsdp_again(model: Decoder) -> nn.Module:
    model.again = True
    return fsdp(model)


def _split(model: Decoder, mesh: Any) -> None:
    for layer in model.layers:
        columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
        parallelize_module(layer, mesh, plan)


def tp(model: Decoder) -> nn.Module:
    _split(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def grid(model: Decoder) -> nn.Module:
    """Tensor parallel within pairs, FSDP2 over them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    _split(model, mesh["tensor"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def compiled(model: Decoder) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="eager")
    return ddp(model)


WAYS: dict[str, Callable[[Decoder], nn.Module]] = {
    f.__name__: f for f in (ddp, fsdp, fsdp_kept, fsdp_mixed, fsdp_again, tp, grid, compiled)
}


def train(way: str, trace: bool, folder: Path) -> list[Any]:
    """Three steps, of which one is traced: losses, collectives so far, and weights at the end."""
    torch.manual_seed(0)
    model = WAYS[way](Decoder())
    rank = dist.get_rank()
    data = {"tp": 0, "grid": rank // 2}.get(way, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(data)
    lines: list[Any] = []

    def step(number: int) -> None:
        loss = model(batch(number, data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.append([loss.item(), collectives()])

    for number in range(3):
        if not (trace and number == TRACED):
            step(number)
            continue
        with ml.trace(model, name=way, keep=ml.Keep(grads=True)) as traced:
            step(number)
        ml.Repo(folder / way).add(traced, verify=False)
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).detach()
        lines.append([local.double().sum().item(), local.double().square().sum().item()])
    return lines


def main() -> None:
    folder, *ways = sys.argv[1:]
    ml.track_init()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
    for way in ways:
        both = {}
        for trace in (False, True):
            before = collectives()
            found = train(way, trace, Path(folder))
            for line in found[:3]:
                line[1] -= before
            both["traced" if trace else "plain"] = found
            dist.barrier()
        (Path(folder) / f"{way}.{dist.get_rank()}.json").write_text(json.dumps(both))


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - a rank that raises must not wait for the others
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
