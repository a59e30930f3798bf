"""Two plain tensors -> one `LeafCheck`: the rules for values. Knows no containers, no modules.

Another implementation is judged by its error against a float64 run of the reference:
`e(y) = |y - hi| / s` with `s` the row maximum of `|hi|`; accepted when
`max e(y) <= max(4 max e(reference), 4 u)` and `rms e(y) <= max(2 rms e(reference), u)`, `u` the
dtype's epsilon. A fixed tolerance accepts tf32, bf16 or zeros for one operator or another. No
rule accepts an error of half the row maximum: zeros never pass for what is not zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec
import numpy as np
import torch
from torch import Tensor

from modulelens.records import LeafCheck, Status
from modulelens.tree import distinct, dtype_name

_TINY = 1e-30
#: Above this share of the row maximum, the reference's own error says that the float64 run is no
#: anchor: it drew other random numbers, or the function is chaotic.
_NO_ANCHOR = 0.25
_WIDEST = 0.49
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def check_tensor(
    expected: Tensor, actual: Tensor, anchor: Tensor | None, *, path: str, same_code: bool
) -> LeafCheck:
    """Compares shape, dtype, NaN and infinity positions, then values.

    `error_ratio` is set where the anchored rule was applied.
    """
    with torch.no_grad():
        if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
            same_shape = expected.shape == actual.shape
            return LeafCheck(
                path=path,
                status=Status.MISMATCH_DTYPE if same_shape else Status.MISMATCH_SHAPE,
                message=f"expected {_kind(expected)}, got {_kind(actual)}",
                numel=expected.numel(),
            )
        exact = LeafCheck(path=path, status=Status.EXACT, numel=expected.numel())
        if expected.is_meta is not actual.is_meta:
            message = f"expected a tensor on {expected.device}, got one on {actual.device}"
            return LeafCheck(path=path, status=Status.MISMATCH_STRUCTURE, message=message)
        expected, actual, anchor = _without_repeats(expected, actual, anchor)
        if expected.is_meta or _same_bytes(expected, actual):
            return exact
        if not _has_numbers(expected.dtype):
            expected, actual = _bits(expected), _bits(actual)
        if not (expected.is_floating_point() or expected.is_complex()):
            return _differs(path, expected, actual, expected != actual)
        wide, other = _wide(expected), _wide(actual)
        infinite = wide.isinf() | other.isinf()
        misplaced = (wide.isnan() != other.isnan()) | (infinite & (wide != other))
        if misplaced.any():
            return _differs(path, wide, other, misplaced, "NaN or infinity at other positions")
        unequal = (wide != other) & ~wide.isnan()
        if not unequal.any():  # zeros of the other sign, or NaNs with another payload
            signs = (wide.signbit() != other.signbit()) & ~wide.isnan()
            if not signs.any():
                return exact
            text = f"the sign of {int(signs.sum())} zeros differs"
            found = _differs(path, wide, other, signs, text)
            return found if same_code else msgspec.structs.replace(found, status=Status.CLOSE)
        if same_code:
            return _differs(path, wide, other, unequal)
        high = _usable_anchor(anchor, expected)
        return _judge(path, wide, other, high, eps=torch.finfo(expected.dtype).eps)


def powerless(expected: Tensor, anchor: Tensor | None, inputs: Iterable[Tensor]) -> str:
    """Why a comparison with this reference proves little; empty where it proves something."""
    with torch.no_grad():
        expected = _host(expected)
        if expected.numel() < 2 or expected.is_meta:
            return ""
        values = distinct(expected)
        if _same_bytes(values, values.flatten()[:1].expand(values.numel()).view_as(values)):
            return "it is constant, so a candidate that ignores its inputs would pass"
        for each in inputs:
            passed_on = check_tensor(expected, each, anchor, path="", same_code=False)
            if passed_on.status.passed:
                return "an input that is passed on as it is would pass too"
        return ""


def _judge(path: str, wide: Tensor, other: Tensor, high: Tensor | None, *, eps: float) -> LeafCheck:
    finite = wide.isfinite()
    target = wide if high is None else torch.where(finite & high.isfinite(), high, wide)
    own = _errors(wide, target, finite)
    anchored = high is not None and own[0] <= _NO_ANCHOR
    if anchored:
        limit = max(4 * own[0], 4 * eps), max(2 * own[1], eps)
        rule = f"the original's own {own[0]:.1e}"
    else:
        target = wide
        widest = (64 if eps < 1e-6 else 4) * eps
        limit = widest, widest / 4
        rule = f"tolerance {widest:.1e}"
    limit = min(limit[0], _WIDEST), limit[1]
    error = _errors(other, target, finite)
    rule = f"error {error[0]:.1e} of the row maximum, {rule}"
    found = _differs(path, wide, other, (wide != other) & finite, rule)
    if anchored:
        found = msgspec.structs.replace(found, error_ratio=error[0] / max(own[0], eps))
    if error[0] > limit[0] or error[1] > limit[1]:
        return found
    return msgspec.structs.replace(found, status=Status.CLOSE, message=rule)


def _errors(value: Tensor, target: Tensor, finite: Tensor) -> tuple[float, float]:
    """Largest and RMS error, in row maxima of the target.

    A row is the last dimension; its maximum counts for at least a thousandth of the tensor's RMS.
    """
    magnitude = torch.where(finite, target.abs(), 0.0)
    least = max(1e-3 * magnitude.square().mean().sqrt().item(), _TINY)
    scale = magnitude.amax(dim=-1, keepdim=True).clamp_min(least)
    error = torch.where(finite, (value - target).abs() / scale, 0.0)
    return error.max().item(), error.square().mean().sqrt().item()


def _usable_anchor(anchor: Tensor | None, expected: Tensor) -> Tensor | None:
    """The anchor widened; None where it holds no more digits than the reference itself."""
    if anchor is None or anchor.shape != expected.shape:
        return None
    high = torch.complex128 if expected.is_complex() else torch.float64
    if anchor.dtype is not high or expected.dtype is high:
        return None
    return _wide(_host(anchor))


def _differs(
    path: str, expected: Tensor, actual: Tensor, bad: Tensor, what: str = "values differ"
) -> LeafCheck:
    count = int(bad.sum())
    first = int(bad.reshape(-1).nonzero()[0])
    # Not torch's: its first call imports sympy, 480 modules, which takes longer than all the rest.
    index = [int(i) for i in np.unravel_index(first, bad.shape)]
    a, b = expected.reshape(-1)[first].item(), actual.reshape(-1)[first].item()
    where = f"; {count} of {bad.numel()} elements, first at {index}: expected {a!r}, got {b!r}"
    difference = (actual.double() - expected.double()).abs()
    usable = difference.isfinite() & bad
    relative = difference / expected.double().abs()
    return LeafCheck(
        path=path,
        status=Status.MISMATCH_VALUE,
        message=what + where,
        max_abs=_largest(difference, usable),
        max_rel=_largest(relative, usable & (expected != 0)),
        mismatched=count,
        numel=bad.numel(),
    )


def _largest(values: Tensor, where: Tensor) -> float | None:
    return values[where].max().item() if where.any() else None


def _wide(tensor: Tensor) -> Tensor:
    """float64 with at least one dimension; real and imaginary parts side by side in the row."""
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.to(torch.complex128))
        return parts.flatten(-2) if tensor.ndim else parts
    return tensor.to(torch.float64).reshape(tensor.shape or (1,))


def _host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.is_meta else tensor.cpu()


def _without_repeats(
    expected: Tensor, actual: Tensor, anchor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The three on the CPU, without the dimensions in which the two are expanded."""
    shape, once = expected.shape, distinct(expected).shape
    if distinct(actual).shape != once:
        return _host(expected), _host(actual), anchor
    if anchor is not None and anchor.shape == shape:
        anchor = anchor[tuple(map(slice, once))]
    return _host(distinct(expected)), _host(distinct(actual)), anchor


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    flat = (_bits(t).contiguous().as_strided((t.numel(),), (1,)) for t in (a, b))
    return torch.equal(*(t.view(torch.uint8) for t in flat))


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as a dtype that every kernel knows."""
    return tensor.view(_BITS[tensor.element_size()])


@functools.cache
def _has_numbers(dtype: torch.dtype) -> bool:
    """Whether torch can say which numbers the bytes stand for; it cannot for `int3` or `bits8`."""
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype).to(torch.complex128)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _kind(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"
