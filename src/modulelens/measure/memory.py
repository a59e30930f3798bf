"""Bytes: of parameters and values, of what a forward keeps for its backward, and at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from modulelens.measure.run import Run
from modulelens.tree import flatten


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def saved_activations(run: Run) -> tuple[int, Any]:
    """Bytes that the forward keeps for the backward, and the output.

    Each storage counts once and whole. Not counted: storages of parameters, buffers and inputs,
    and what a custom function stashes on its context by itself. Use it inside `with run:`.
    """
    run.fresh()
    kept: dict[int, tuple[weakref.ref[Any], int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in flatten(tensor).tensors:
            storage = part.untyped_storage()
            kept[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return tensor.detach()

    before = [*run.state.tensors, *flatten(run.inputs).tensors]
    resident = {t.untyped_storage()._cdata for t in before if t.layout is torch.strided}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run.forward()
    alive = {key: n for key, (reference, n) in kept.items() if reference() is not None}
    return sum(n for key, n in alive.items() if key not in resident), output


def peak_of(events: Iterable[Any]) -> int:
    """Most bytes allocated at once, on top of what was there, from a profiler's memory events."""
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            now += event.nbytes()
            most = max(most, now)
    return most
