"""What a trace keeps of each module. Knows the user's wish, not how it is carried out."""

from __future__ import annotations

import dataclasses
from typing import Literal

from modulelens.errors import UsageError

Content = Literal["full", "shape"]
_LIMITS = ("max_bytes", "max_module_bytes")
_CHOICES = {
    "tensors": ("full", "shape"),
    "weights": ("full", "shape"),
    "grads": (True, False),
    "embedding_rows": ("touched", "all"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """What a trace keeps.

    Args:
        tensors: Inputs and outputs: "full" keeps their bytes, "shape" keeps description and value
            statistics; small integer and bool tensors keep their values in both.
        weights: The same for parameters and buffers.
        grads: Keep the gradients of outputs, inputs and parameters, so that backward is checked.
        max_calls: Most calls kept per module and step; further ones are counted.
        max_bytes: Most bytes of tensors kept per trace; what does not fit keeps shapes only, and
            `coverage` names it once the trace is stored. None: no limit.
        max_module_bytes: The same for one module: its own weights, its inputs and outputs.
        embedding_rows: "touched" keeps, of an embedding table above 1 MiB that only lookups use,
            the rows that were looked up, unless these are more than half; "all" the whole table.
    """

    tensors: Content = "full"
    weights: Content = "full"
    grads: bool = False
    max_calls: int = 8
    max_bytes: int | None = None
    max_module_bytes: int | None = None
    embedding_rows: Literal["touched", "all"] = "touched"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                self._refuse(name, " or ".join(map(repr, choices)))
        for name, or_none in (("max_calls", ""), *dict.fromkeys(_LIMITS, ", or None").items()):
            limit = getattr(self, name)
            if not ((type(limit) is int and limit >= 1) or (limit is None and or_none)):
                self._refuse(name, f"a whole number of at least 1{or_none}")

    def _refuse(self, name: str, use: str) -> None:
        raise UsageError(f"Keep({name}={getattr(self, name)!r}): use {use}")
