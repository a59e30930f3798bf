"""What a trace keeps of each module. Knows the user's wish, not how it is carried out."""

from __future__ import annotations

import dataclasses
from typing import Literal

from modulelens.errors import UsageError

Content = Literal["full", "shape"]


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
        for name in ("tensors", "weights"):
            if getattr(self, name) not in ("full", "shape"):
                raise UsageError(f"Keep({name}={getattr(self, name)!r}): use 'full' or 'shape'")
        if self.max_calls < 1:
            raise UsageError(f"Keep(max_calls={self.max_calls}): at least 1")
        for name in ("max_bytes", "max_module_bytes"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise UsageError(f"Keep({name}={limit}): at least 1, or None")
        if self.embedding_rows not in ("touched", "all"):
            raise UsageError(
                f"Keep(embedding_rows={self.embedding_rows!r}): use 'touched' or 'all'"
            )
