"""One rank of a job that trains a model in several ways, untraced and traced.

    torchrun --nproc-per-node 2 job.py FOLDER WAY...

Leaves one repo per way in FOLDER, and `<way>.<rank>.json` with what both trainings printed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.counting import collectives
from tests.distributed.models import Block, Decoder, batch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import modulelens as ml

TRACED = 1  # the step
SMALL = ("ddp_micro", "fsdp_micro", "flat", "flat_micro", "flat_unused")


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


graphs = [0, 0]  # made by the compiler, and runs of them


def counting(graph: Any, _example: Any) -> Callable[..., Any]:
    """A compiler that changes nothing and counts."""
    graphs[0] += 1

    def run(*args: Any) -> Any:
        graphs[1] += 1
        return graph(*args)

    return run


def ddp_micro(model: Decoder) -> nn.Module:
    """The whole of it compiled."""
    return torch.compile(ddp(model), backend=counting)  # type: ignore[return-value]


def fsdp_micro(model: Decoder) -> nn.Module:
    """Checkpointing wrappers around its blocks, and the whole of it compiled."""
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return torch.compile(fsdp(model), backend=counting)  # type: ignore[return-value]


def flat(model: Decoder, **options: Any) -> nn.Module:
    """The first FSDP: wrappers, and one flat parameter for each."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu")} | options
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def flat_unused(model: Decoder) -> nn.Module:
    """With a unit that no call gathers, and one that is called, and gathered, twice."""
    model.unused = Block(16, 4)
    model.rounds = 2
    return flat(model)


def flat_micro(model: Decoder) -> nn.Module:
    half = MixedPrecision(param_dtype=torch.bfloat16)
    made = flat(model, use_orig_params=False, mixed_precision=half)
    apply_activation_checkpointing(made, check_fn=lambda m: isinstance(m, Block))
    return made


WAYS: dict[str, Callable[[Decoder], nn.Module]] = {
    f.__name__: f
    for f in (
        *(ddp, fsdp, fsdp_kept, fsdp_mixed, fsdp_again, tp, grid, compiled),
        *(ddp_micro, fsdp_micro, flat, flat_micro, flat_unused),
    )
}


@contextlib.contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Gradients stay on their rank meanwhile."""
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, "no_sync"):
        with inner.no_sync():
            yield
        return
    inner.set_requires_gradient_sync(False)
    yield
    inner.set_requires_gradient_sync(True)


def train(way: str, trace: bool, folder: Path) -> list[Any]:
    """Three steps, of which one is traced: losses, collectives so far, and weights at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = WAYS[way](Decoder(layers=1 if way in SMALL else 2))
    rank = dist.get_rank()
    data = {"tp": 0, "grid": rank // 2}.get(way, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    micro, scaled = way.endswith("micro"), way == "ddp_micro"
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    torch.manual_seed(data)
    lines: list[Any] = []
    compiled: list[Any] = []

    def one(number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=scaled):
            loss = model(batch(number, data)).float().square().mean()
        scaler.scale(loss).backward()
        return loss.item()

    def step(number: int) -> None:
        losses = []
        if micro:  # two batches for one step of the optimizer
            with quiet(model):
                losses.append(one(number + 10))
        losses.append(one(number))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        lines.append([sum(losses), collectives()])

    for number in range(3):
        before = graphs[:]
        if not (trace and number == TRACED):
            # Compiled, a checkpoint makes other random draws: the step compared runs eagerly too.
            eagerly = number == TRACED and way == "fsdp_micro"
            with torch.compiler.set_stance("force_eager") if eagerly else contextlib.nullcontext():
                step(number)
            compiled += [a - b for a, b in zip(graphs, before, strict=True)] * (number != TRACED)
            continue
        with ml.trace(model, name=way, keep=ml.Keep(grads=True), steps=1 + micro) as traced:
            step(number)
        assert graphs == before, "it ran eagerly, and compiled nothing"
        ml.Repo(folder / way).add(traced, verify=False)
    lines.append(compiled)  # before and after the traced step
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
