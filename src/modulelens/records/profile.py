"""Where the time, the FLOPs and the memory of one module go."""

from __future__ import annotations

import msgspec


class OpRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operator of a profile. Times are self times over one forward and backward.

    `flops` counts a multiply-add as 2; None means UNKNOWN: no formula for this operator.
    """

    name: str
    calls: int
    self_s: float
    flops: int | None = None
    backward: bool = False


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Profile of one module on its captured (or synthesised) inputs.

    `flops_forward` and `flops_backward` are sums over operators with a formula; `flops_unknown`
    maps each operator without one to its number of calls (empty: the sums are complete).
    `saved_bytes` are activations kept for backward, without parameters, buffers and inputs.
    """

    forward_s: float
    backward_s: float | None = None
    flops_forward: int = 0
    flops_backward: int = 0
    flops_unknown: dict[str, int] = {}
    params: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: int | None = None
    device: str = "cpu"
    num_threads: int = 1
    synthesized: bool = False
    ops: tuple[OpRow, ...] = ()
    trace_file: str = ""
    notes: tuple[str, ...] = ()

    @property
    def flops_complete(self) -> bool:
        """Whether every operator that may do arithmetic had a formula."""
        return not self.flops_unknown
