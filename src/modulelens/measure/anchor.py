"""The float64 twin of a run: the anchor that other implementations are judged by."""

from __future__ import annotations

import copy

import msgspec
import torch
from torch import Tensor

from modulelens.errors import text_of
from modulelens.measure.run import Run, like
from modulelens.tree import distinct, flatten, is_plain


def float64_run(run: Run) -> tuple[Run | None, str]:
    """The run's twin in float64, complex128 for complex, from the state and inputs it starts with.

    Ties and shared objects between module and arguments stay. The values are those of the rounded
    tensors, exactly.

    Returns:
        The twin, or None with the reason why there is none. A closure has no twin: its tensors
        cannot be reached.
    """
    method = "__call__" if run.owner is run.module else getattr(run.module, "__name__", "")
    if run.owner is None or not hasattr(type(run.owner), method):
        return None, "only a module, or one of its methods, can be run in float64"
    run.fresh()
    memo = {}
    try:
        with torch.inference_mode(False), torch.no_grad():
            for tensor in [*run.state.tensors, *flatten((run.args, run.kwargs)).tensors]:
                if is_plain(tensor):
                    memo[id(tensor)] = like(tensor, _widened(tensor.detach()))
            parts = copy.deepcopy((run.owner, run.args, run.kwargs), memo)
    except Exception as error:  # noqa: BLE001 - boundary: copying runs foreign __deepcopy__
        return None, f"no float64 copy: {text_of(error)}"
    context = msgspec.structs.replace(run.context, autocast=(), default_dtype="float64")
    function = parts[0] if run.owner is run.module else getattr(parts[0], method)
    return Run(function, *parts[1:], context=context, rng=run.rng), ""


def _widened(tensor: Tensor) -> Tensor:
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    wide = torch.complex128 if tensor.is_complex() else wide
    made = distinct(tensor).to(wide, copy=True)
    return made if made.shape == tensor.shape else made.expand(tensor.shape)
