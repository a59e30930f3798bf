"""The float64 twin of a run: the anchor that other implementations are judged by."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from modulelens.context import read_ambient
from modulelens.measure.run import Run
from modulelens.measure.state import ModuleState
from modulelens.tree import flatten, is_plain


def float64_reference(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Copies of all three with every floating-point tensor in float64, complex ones in complex128.

    Ties and shared objects between module and arguments stay. The values are those of the rounded
    tensors, exactly.

    Raises:
        Exception: Something cannot be copied, or the device has no float64.
    """
    memo: dict[Any, Any] = {}
    tensors = ModuleState(module if isinstance(module, nn.Module) else None).tensors
    with torch.inference_mode(False), torch.no_grad():
        for tensor in [*tensors, *flatten((args, kwargs)).tensors]:
            if is_plain(tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _widened(tensor)
        return (
            copy.deepcopy(module, memo),
            copy.deepcopy(args, memo),
            copy.deepcopy(kwargs, memo),
        )


def float64_run(run: Run) -> tuple[Run | None, str]:
    """The run's twin in float64, from the state and inputs it starts with.

    Returns:
        The twin, or None with the reason why there is none. A method or a closure has no twin:
        its tensors cannot be reached.
    """
    if run.owner is None or run.owner is not run.module:
        return None, "only a whole module can be run in float64"
    run.fresh()
    try:
        module, args, kwargs = float64_reference(run.owner, run.args, run.kwargs)
    except Exception as error:  # noqa: BLE001 - boundary: copying runs foreign __deepcopy__
        return None, f"no float64 copy: {error}"
    grads = run.grad_output
    context = msgspec.structs.replace(
        run.context or read_ambient(), autocast=(), default_dtype="float64"
    )
    return (
        Run(
            module,
            args,
            kwargs,
            context=context,
            rng=run.rng,
            grad_output=None if grads is None else [g if g is None else _widened(g) for g in grads],
        ),
        "",
    )


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        wide = tensor.detach().to(torch.complex128, copy=True)
    elif tensor.is_floating_point():
        wide = tensor.detach().to(torch.float64, copy=True)
    else:
        wide = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(wide, requires_grad=tensor.requires_grad)
    return wide.requires_grad_(tensor.requires_grad)
