"""What frameworks make of a module, seen through: wrappers around it, classes and hooks.

Knows them by the names of their classes, and imports none that is not loaded.
"""

from __future__ import annotations

from typing import Any

from torch import nn

#: How attributes begin that frameworks put on modules for their own state.
FRAMEWORK_KEYS = ("__composable_api", "_distribute_module_applied")
_FRAMEWORKS = ("torch.distributed.", "torchrec.distributed.")


def eager(module: nn.Module) -> nn.Module:
    """The module inside what `torch.compile(module)` gives; any other module as it is."""
    while type(module).__name__ == "OptimizedModule" and isinstance(
        inner := module._modules.get("_orig_mod"), nn.Module
    ):
        module = inner
    return module


def unwrap(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside `torch.compile`, data parallel and model parallel wrappers.

    Returns:
        The inner model, and the class names of the wrappers around it, outermost first.
    """
    wrappers: list[str] = []
    while (inner := _inside(model)) is not None:
        wrappers.append("torch.compile" if eager(model) is inner else type(model).__name__)
        model = inner
    return model, wrappers


def _inside(model: nn.Module) -> nn.Module | None:
    if eager(model) is not model:
        return eager(model)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module  # type: ignore[no-any-return]
    bases = (base.__name__ for base in type(model).__mro__ if of_framework(base))
    wraps = "DistributedModelParallel" in bases
    return model._modules.get("_dmp_wrapped_module") if wraps else None


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, a wrapper around it or a module inside it runs code of `torch.compile`."""
    return any(
        eager(module) is not module or vars(module).get("_compiled_call_impl") is not None
        for module in model.modules()
    )


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
    """The path without the segment that `torch.compile` puts in."""
    return ".".join(part for part in fqn.split(".") if part != "_orig_mod")
