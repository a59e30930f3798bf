"""One module's profile: latency, FLOPs, bytes and operators, each from a replay of its own."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from modulelens.errors import UsageError
from modulelens.measure.benchmark import RunTrial, benchmark
from modulelens.measure.flops import FlopCount, count_flops
from modulelens.measure.memory import bytes_of, peak_of, saved_activations
from modulelens.measure.run import Run
from modulelens.records import OpRow, Profile
from modulelens.tree import flatten

_FORWARD, _BACKWARD = "modulelens.forward", "modulelens.backward"


def profile(
    run: Run, *, backward: bool = True, trace_file: str | None = None, budget_s: float = 2.0
) -> Profile:
    """Profiles a run; the module is left as it was.

    Latencies are taken without any hook or profiler. `peak_bytes` is what one forward and
    backward allocate at most, on top of the module and its inputs, kernels' scratch included.
    The operators' times come from `torch.profiler` and include its overhead.

    Args:
        run: The module, its inputs and context.
        backward: Profile the backward too; without an output that requires grad there is none.
        trace_file: Where to write a Chrome trace (`.json`, or `.json.gz`); None: nowhere.
        budget_s: Seconds for the latencies; the replays for the rest come on top.

    Raises:
        UsageError: The folder of `trace_file` does not exist.
    """
    if trace_file is not None and not Path(trace_file).resolve().parent.is_dir():
        raise UsageError(f"cannot write {trace_file}: its folder does not exist")
    notes = []
    with run:
        saved, output = saved_activations(run)
        outputs = flatten(output).tensors
        if backward and not any(t.requires_grad for t in outputs):
            backward = False
            notes.append("no output requires grad: there is no backward")
        output_bytes = bytes_of(outputs)
        del output, outputs
        share = budget_s / (2 if backward else 1)
        forward = benchmark(RunTrial(run, "forward"), label="forward", budget_s=share)
        times = RunTrial(run, "backward")
        back = benchmark(times, label="backward", budget_s=share) if backward else None
    flops = count_flops(run, backward=backward)
    with run:
        ops, peak = _operators(run, flops, backward=backward, trace_file=trace_file)
        run.fresh()
    owner = run.owner or nn.Module()
    return Profile(
        forward_s=forward.median_s,
        backward_s=back.median_s if back else None,
        flops_forward=flops.forward,
        flops_backward=flops.backward,
        flops_unknown=flops.unknown,
        params=sum(p.numel() for p in owner.parameters()),
        param_bytes=bytes_of(owner.parameters()),
        buffer_bytes=bytes_of(owner.buffers()),
        input_bytes=bytes_of(flatten((run.args, run.kwargs)).tensors),
        output_bytes=output_bytes,
        saved_bytes=saved,
        peak_bytes=peak,
        device=forward.device,
        num_threads=forward.num_threads,
        ops=ops,
        trace_file=trace_file or "",
        notes=(*notes, *forward.notes),
    )


def _operators(
    run: Run, flops: FlopCount, *, backward: bool, trace_file: str | None
) -> tuple[tuple[OpRow, ...], int]:
    """Operators by self time, and the peak of the bytes allocated on top."""
    cuda = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    run.fresh()
    before = torch.cuda.memory_allocated(run.device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        with record_function(_FORWARD):
            output = run.forward()
        with record_function(_BACKWARD):
            if backward:
                run.backward(output)
        if cuda:
            torch.cuda.synchronize(run.device)
    del output
    if trace_file is not None:
        profiler.export_chrome_trace(trace_file)
    rows = _rows(profiler.events(), flops)
    if cuda:
        return rows, torch.cuda.max_memory_allocated(run.device) - before
    results: Any = profiler.profiler
    return rows, peak_of(results.kineto_results.events())


def _rows(events: Any, flops: FlopCount) -> tuple[OpRow, ...]:
    boundary = next(event.time_range.start for event in events if event.name == _BACKWARD)
    times: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for event in events:
        if event.name not in (_FORWARD, _BACKWARD, "[memory]"):
            spent = max(event.self_cpu_time_total, event.self_device_time_total)
            times[event.name, event.time_range.start >= boundary].append(spent * 1e-6)
    rows = [
        OpRow(
            name=name,
            calls=len(seconds),
            self_s=sum(seconds),
            flops=flops.flops.get((name, late), _unseen(name)),
            backward=late,
        )
        for (name, late), seconds in times.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.self_s))


def _unseen(name: str) -> int | None:
    """FLOPs of a row that the counter did not meet: of torch's own, it counts what they call.

    Rows without a namespace are autograd's nodes.
    """
    space, separator, _ = name.partition("::")
    return 0 if not separator or space in ("aten", "autograd") else None
