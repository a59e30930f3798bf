"""Initial values that a constructor need not make, because captured ones take their place.

Knows `torch.nn.init`; neither records nor what is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@contextlib.contextmanager
def spared_values(least: int, spared: list[StorageWeakRef]) -> Iterator[None]:
    """Lets `torch.nn.init` leave tensors of at least `least` elements as they are.

    Their memory is noted in `spared`: what still holds it afterwards has no values.
    """

    def instead_of(fill: Callable[..., Any]) -> Callable[..., Any]:
        def spare(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() < least:
                return fill(tensor, *args, **kwargs)
            spared.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor

        return spare

    inside = vars(nn.init)
    saved = {name: inside[name] for name in inside if name.endswith("_") and name[0] != "_"}
    inside.update({name: instead_of(fill) for name, fill in saved.items()})
    try:
        yield
    finally:
        inside.update(saved)
