"""Initial values that a constructor need not make: captured ones take their place.

Knows `torch.nn.init`; neither records nor what is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_RANDOM = ("kaiming", "normal", "orthogonal", "sparse", "trunc", "uniform", "xavier")
#: Random values of fewer elements take no time.
_LARGE = 1 << 14


class Spared:
    """While open, `torch.nn.init` gives large tensors no random values: they hold anything."""

    def __init__(self) -> None:
        self._memory: list[StorageWeakRef] = []

    @property
    def in_use(self) -> bool:
        """Whether anything still holds memory that was given no values."""
        return not all(each.expired() for each in self._memory)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The scope of one constructor."""
        with _replaced(_RANDOM, self._instead_of):
            yield

    def _instead_of(self, fill: Callable[..., Any]) -> Callable[..., Any]:
        def spare(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() < _LARGE:
                return fill(tensor, *args, **kwargs)
            # Not even zeros: memory that nothing touches costs nothing.
            self._memory.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor

        return spare


@contextlib.contextmanager
def no_values() -> Iterator[None]:
    """Lets `torch.nn.init` do nothing, for tensors on the meta device."""
    # There it is wasted work, and the first `trunc_normal_` imports 800 modules, which takes as
    # long as importing torch.
    with _replaced(("",), lambda _: lambda tensor, *_args, **_kwargs: tensor):
        yield


@contextlib.contextmanager
def _replaced(starts: tuple[str, ...], by: Callable[[Any], Any]) -> Iterator[None]:
    inside = vars(nn.init)
    saved = {
        name: function
        for name, function in inside.items()
        if name.endswith("_") and name[0] != "_" and name.startswith(starts)
    }
    inside.update({name: by(function) for name, function in saved.items()})
    try:
        yield
    finally:
        inside.update(saved)
