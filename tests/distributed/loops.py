"""One rank of trainers' and pipelines' loops, untraced and traced.

    torchrun --nproc-per-node 2 loops.py FOLDER WAY...

Leaves one repo per way in FOLDER, and `<way>.<rank>.json` with the weights of both trainings.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
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
from tests.distributed.models import MLP, Block, batch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import modulelens as ml

WIDTH = 8
Tracer = Callable[..., Any]


class Front(nn.Module):
    """The first stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(50, 16), Block(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.tokens(ids))


class Back(nn.Module):
    """The last one."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(16, 4), nn.Linear(16, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def _pipeline(schedule: Any, tracer: Tracer, **chosen: Any) -> nn.Module:
    rank = dist.get_rank()
    part = (Front, Back)[rank]()
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    made = schedule(stage, n_microbatches=3, loss_fn=lambda out, _target: out.square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    with tracer(part, **chosen):
        for number in range(3):
            words = {} if rank == 0 else {"target": torch.zeros(3)}
            made.step(*[batch(number, 0)] * (rank == 0), **words)
            optimizer.step()
            optimizer.zero_grad()
    return part


def all_then_all(tracer: Tracer) -> nn.Module:
    return _pipeline(ScheduleGPipe, tracer, warmup=1)


def one_by_one(tracer: Tracer) -> nn.Module:
    return _pipeline(Schedule1F1B, tracer)


def accelerated(tracer: Tracer) -> nn.Module:
    accelerator = importlib.import_module("accelerate").Accelerator(
        cpu=True, gradient_accumulation_steps=2
    )
    model = MLP(WIDTH, 16)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with tracer(wrapped, warmup=2, steps=2):
        for each in batches(6):
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(each).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return model


def lightning(tracer: Tracer) -> nn.Module:
    light = importlib.import_module("pytorch_lightning")
    task: Any = importlib.import_module("tests.distributed.lit").Task(MLP(WIDTH, 16))
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = light.Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, **off)
    with tracer(task, warmup=1):
        trainer.fit(task, torch.utils.data.DataLoader(batches(6), batch_size=None))  # type: ignore[arg-type]
    return task  # type: ignore[no-any-return]


def main() -> None:
    folder, *ways = sys.argv[1:]
    ml.track_init()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
    for way in ways:
        told: dict[str, Any] = {}
        for kind in ("plain", "traced"):
            traces: list[ml.Trace] = []

            def tracer(
                model: nn.Module, *, way: str = way, into: list[Any] = traces, **more: Any
            ) -> Any:
                into.append(ml.trace(model, name=way, keep=ml.Keep(grads=True), **more))
                return into[0]

            torch.manual_seed(dist.get_rank())
            before = collectives()
            untraced = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
            model = globals()[way](tracer if kind == "traced" else untraced)
            count = collectives() - before
            told[kind] = [count, *(p.double().sum().item() for p in model.parameters())]
            for trace in traces:
                told["warnings"] = trace.warnings
                ml.Repo(Path(folder) / way).add(trace, verify=False)
            dist.barrier()
        (Path(folder) / f"{way}.{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - a rank that raises must not wait for the others
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
