"""One call of a module as a step saw it. Knows structures and references, no hooks and no disk."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from modulelens.context import RngState
from modulelens.records import Ambient, TensorRef

#: The number of no module: of what went wrong outside of all calls.
OUTSIDE = -1


@dataclasses.dataclass(eq=False, slots=True)
class SeenCall:
    """One call as it was seen. `args` ... `output` are structures over snapshot references.

    `nested` is a call inside another call of the same module.
    """

    number: int
    step: int
    thread: int
    ambient: Ambient
    rng: RngState
    entered: int
    args: Any
    kwargs: Any
    leaves: list[tuple[Tensor, TensorRef]]
    containers: bool
    left: int = 0
    output: Any = None
    args_after: Any = None
    kwargs_after: Any = None
    method: str = "forward"
    nested: bool = False
    opaque: list[str] = dataclasses.field(default_factory=list)
    opaque_output: list[str] = dataclasses.field(default_factory=list)
    grad_output: dict[str, Any] = dataclasses.field(default_factory=dict)
    grad_input: dict[str, Any] = dataclasses.field(default_factory=dict)
