"""FLOPs of a replay, operator by operator. Knows formulas over shapes, no times.

A multiply-add counts as 2. Counted are matrix products, convolutions, attention and fused
recurrent layers; the backward is what really ran. By policy, everything else in torch's own
operator set is 0: views and copies, elementwise functions, reductions, normalisation, pooling,
indexing, sorting, random numbers. An operator that is neither is UNKNOWN, with its calls: linear
algebra and Fourier transforms, and every operator of another library.

Fused attention counts the full score matrix, masked parts included, and recomputes it in the
backward (5 products where the forward has 2). Code that hides from the dispatcher (numpy, Triton
kernels started directly) is not seen.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    baddbmm_flop,
    flop_registry,
    mm_flop,
    sdpa_backward_flop,
    sdpa_flop,
    shape_wrapper,
)

from modulelens.measure.run import Run

Formula = Callable[..., int]
Shape = tuple[int, ...]

#: Namespaces of operators that move data or describe tensors.
_FREE_NAMESPACES = frozenset({"prim", "prims", "profiler", "c10d", "_c10d_functional", "_dtensor"})
#: torch's own operators that multiply and add a lot and have no formula.
_ARITHMETIC = re.compile(
    r"^_?linalg_(?!vector_norm|check_errors|diagonal|cross)|^_?fft_(?!shift|ifftshift)"
    r"|^(cholesky|lu_solve|triangular_solve|ormqr|geqrf|svd|_svd|inverse|matrix_exp)"
    r"|^_?[cp]dist|^_trilinear|^(mkldnn|cudnn|miopen)_(linear|conv)|rnn|convolution|attention"
    r"|multi_head|transformer_encoder|_mm(_|$)|(?<!co)mm$|int[48]pack|^(ger|addr|addmv|kron)$"
)


def register_formula(op: Any, formula: Formula) -> None:
    """Gives an operator its FLOPs.

    Args:
        op: `torch.ops.ns.name`, one of its overloads, or "ns::name".
        formula: Called with the operator's arguments, each tensor replaced by its shape, and
            `out_shape`; returns FLOPs, a multiply-add as 2. `lambda *a, **k: 0` for an operator
            that only moves data.
    """
    _FORMULAS[op if isinstance(op, str) else _name_of(op)] = shape_wrapper(formula)


@dataclass
class FlopCount:
    """What ran: (operator, in the backward) -> calls and FLOPs, None where UNKNOWN."""

    calls: Counter[tuple[str, bool]] = field(default_factory=Counter)
    flops: dict[tuple[str, bool], int | None] = field(default_factory=dict)

    @property
    def forward(self) -> int:
        """FLOPs of the forward, over the operators that are known."""
        return sum(n or 0 for (_, backward), n in self.flops.items() if not backward)

    @property
    def backward(self) -> int:
        """FLOPs of the backward, recomputation included, over the operators that are known."""
        return sum(n or 0 for (_, backward), n in self.flops.items() if backward)

    @property
    def unknown(self) -> dict[str, int]:
        """Operators without a formula, and how often they ran."""
        found: Counter[str] = Counter()
        for (name, backward), flops in self.flops.items():
            if flops is None:
                found[name] += self.calls[name, backward]
        return dict(found)


def count_flops(run: Run, *, backward: bool = True) -> FlopCount:
    """Counts one replay; compiled parts run uncompiled for it."""
    count = FlopCount()
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(run)
        run.fresh()
        with _Counter(count, backward=False):
            output = run.forward()
        if backward:
            with _Counter(count, backward=True):
                run.backward(output)
    return count


class _Counter(TorchDispatchMode):
    def __init__(self, count: FlopCount, *, backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self._backward = backward

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports all of torch._dynamo, as slow as torch, to guard nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _formula(func)
        if formula is None and isinstance(func, torch._ops.OpOverload):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        key = _name_of(func), self._backward
        flops, before = _flops(func, formula, args, kwargs, out), self._count.flops.get(key, 0)
        self._count.calls[key] += 1
        self._count.flops[key] = None if flops is None or before is None else before + flops
        return out


def _name_of(op: Any) -> str:
    packet = getattr(op, "_overloadpacket", op)
    name: str = getattr(packet, "_qualified_op_name", "") or f"higher_order::{op}"
    return name


def _formula(func: Any) -> Formula | None:
    packet = getattr(func, "_overloadpacket", func)
    return _FORMULAS.get(_name_of(func)) or flop_registry.get(packet)


def _flops(func: Any, formula: Formula | None, args: Any, kwargs: Any, out: Any) -> int | None:
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=out))
        except Exception:  # noqa: BLE001 - boundary: a formula for shapes it was not written for
            return None
    namespace, _, name = _name_of(func).partition("::")
    if namespace == "aten":
        return None if _ARITHMETIC.search(name) else 0
    return 0 if namespace in _FREE_NAMESPACES else None


def _convolution_backward(grad: Shape, x: Shape, weight: Shape, *options: Any, **_: Any) -> int:
    """Each gradient costs as much as the forward; torch's formula is off by the groups.

    `options` are the bias's shape, stride, padding, dilation, transposed, ..., output mask.
    """
    positions = x[2:] if options[4] else grad[2:]
    forward: int = 2 * x[0] * prod(positions) * prod(weight)
    return forward * (bool(options[-1][0]) + bool(options[-1][1]))


def _rnn_layer(x: Shape, *weights: Any, **_: Any) -> int:
    """One direction of one recurrent layer: every position meets both weights."""
    per_position: int = prod(weights[0]) + prod(weights[1])
    return 2 * prod(x[:-1]) * per_position


def _attention_block(query: Shape, key: Shape, _: Shape, width: int, *__: Any, **___: Any) -> int:
    """Projections in and out, and attention, of the fused inference path."""
    batch, length, others = query[0], query[1], key[1]
    projections = 4 * width * width * batch * (length + others)
    return projections + 4 * batch * length * others * width


def _encoder_layer(source: Shape, width: int, *rest: Any, **_: Any) -> int:
    feed_forward: int = 4 * prod(source[:-1]) * width * rest[12][0]
    return _attention_block(source, source, source, width) + feed_forward


_SHAPE_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("aten::mv", "aten::dot", "aten::vdot"), lambda a, *_, **__: 2 * prod(a)),
    "aten::addmv": lambda _, a, *__, **___: 2 * prod(a),
    "aten::mkldnn_linear": lambda x, weight, *_, **__: 2 * prod(x) * weight[0],
    "aten::convolution_backward": _convolution_backward,
    "aten::_native_multi_head_attention": _attention_block,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::mkldnn_rnn_layer": _rnn_layer,
    "aten::mkldnn_rnn_layer_backward": lambda *shapes, **_: 2 * _rnn_layer(*shapes),
}
#: "namespace::name" -> formula over arguments; looked up before torch's own registry.
_FORMULAS: dict[str, Formula] = {
    "aten::addbmm": baddbmm_flop,
    "aten::_int_mm": mm_flop,
    "aten::_scaled_dot_product_flash_attention_for_cpu": sdpa_flop,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop,
    **{name: shape_wrapper(formula) for name, formula in _SHAPE_FORMULAS.items()},
}
