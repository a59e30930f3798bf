"""What frameworks make of a module, seen through: wrappers around it, classes and hooks.

Knows them by the names of their classes, and imports none that is not loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

#: How attributes begin that frameworks put on modules for their own state.
FRAMEWORK_KEYS = (
    *("__composable_api", "_distribute_module_applied"),
    *("_is_fsdp_managed_module", "_fsdp_use_orig_params"),
)
_FRAMEWORKS = ("torch.distributed.", "torchrec.distributed.")
#: Classes whose modules stand in the place of one that they call, and where they hold it.
_STAND_INS = {
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def bare(module: nn.Module) -> nn.Module:
    """The module inside what compiling, FSDP or checkpointing put in its place; else as it is."""
    while (inner := _stood_in_for(module)) is not None:
        module = inner
    return module


def _stood_in_for(module: nn.Module) -> nn.Module | None:
    names = (b.__name__ for b in type(module).__mro__ if b.__module__.startswith("torch."))
    place = next((_STAND_INS[name] for name in names if name in _STAND_INS), None)
    return None if place is None else module._modules.get(place)


def unwrap(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside `torch.compile`, data parallel and model parallel wrappers.

    Returns:
        The inner model, and the class names of the wrappers around it, outermost first.
    """
    wrappers: list[str] = []
    while (inner := _inside(model)) is not None:
        wrappers.append("torch.compile" if _is_compiled(model) else type(model).__name__)
        model = inner
    return model, wrappers


def _inside(model: nn.Module) -> nn.Module | None:
    if (inner := _stood_in_for(model)) is not None:
        return inner
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module  # type: ignore[no-any-return]
    bases = (base.__name__ for base in type(model).__mro__ if of_framework(base))
    wraps = "DistributedModelParallel" in bases
    return model._modules.get("_dmp_wrapped_module") if wraps else None


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, a wrapper around it or a module inside it runs code of `torch.compile`."""
    return any(
        _is_compiled(module) or vars(module).get("_compiled_call_impl") is not None
        for module in model.modules()
    )


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule"


def own_class(cls: type) -> type:
    """The class as its author wrote it: parametrising and `fully_shard` make others at run time."""
    parametrized = cls.__name__.startswith("Parametrized") and cls.__module__.startswith("torch.")
    bases = cls.__mro__[1:]
    sharded = of_framework(cls) and any(base.__name__ == "FSDPModule" for base in bases)
    if not (parametrized or sharded):
        return cls
    return own_class(next(base for base in bases if not of_framework(base)))


def is_framework_hook(hook: Any) -> bool:
    """Whether a sharding framework put it there: it moves weights and values, computes nothing."""
    hook = getattr(hook, "func", hook)
    owner = getattr(hook, "__self__", None)
    return of_framework(hook if owner is None else type(owner))


def of_framework(found: Any) -> bool:
    """Whether a class or function is of a sharding framework."""
    return str(getattr(found, "__module__", "")).startswith(_FRAMEWORKS)


def clean_fqn(fqn: str) -> str:
    """The path without the segments that wrappers put in."""
    return ".".join(part for part in fqn.split(".") if part not in _STAND_INS.values())


def schedules() -> list[type]:
    """The classes of pipeline schedules: one calls its stage's module several times per step."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    found: list[type] = [vars(module)["_PipelineSchedule"]] if module else []
    for cls in found:
        found += cls.__subclasses__()
    return found[1:]


def runs(schedule: Any, model: nn.Module) -> bool:
    """Whether it is a pipeline schedule with a stage of which the model is the module."""
    if isinstance(schedule, nn.Module):
        return False
    inside = vars(schedule)
    stages = (inside.get("_stage"), *inside.get("_stages", ()))
    return any(stage is not None and unwrap(stage.submod)[0] is model for stage in stages)


def is_ready(caller: Any) -> bool:
    """Whether what calls the model does it for its values: a new pipeline tries shapes first."""
    flags = ("_stage_forward_initialized", "_stages_forward_initialized")
    return all(vars(caller).get(flag, True) for flag in flags)
