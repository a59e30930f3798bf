"""What holds of comparing any two values: it follows no example."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.tree.values import tensors, values
from torch import Tensor

from modulelens.measure.compare import compare, doubts, verdict
from modulelens.records import Status

quick = settings(max_examples=80, deadline=None)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
both = st.booleans()


def status(expected: Any, actual: Any, **how: Any) -> Status:
    return verdict(compare(expected, actual, **how)).status


@st.composite
def floats(draw: st.DrawFn, dtypes: Any = FLOATS) -> Tensor:
    """A matrix with rows of very different size; zeros, NaN and infinities now and then."""
    dtype = draw(st.sampled_from(dtypes))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    made = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    made *= 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)
    made[torch.rand(made.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    for odd in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=2)):
        made[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = odd
    return made.to(dtype)


@given(values | tensors() | floats(), both)
@quick
def test_everything_equals_itself_unless_it_cannot_be_compared(value: Any, same_code: bool) -> None:
    found = status(value, value, same_code=same_code)
    assert found in (Status.EXACT, Status.NOT_COMPARABLE)


@given(st.one_of(values, tensors(), floats()), st.one_of(values, tensors(), floats()), both)
@quick
def test_both_directions_tell_the_same_kind_of_difference(
    left: Any, right: Any, same_code: bool
) -> None:
    there, back = (status(*pair, same_code=same_code) for pair in ((left, right), (right, left)))
    assert there.passed == back.passed or {there, back} <= {Status.CLOSE, Status.MISMATCH_VALUE}
    if Status.NOT_COMPARABLE not in (there, back) and not there.passed and not back.passed:
        assert there is back


@given(floats(), st.integers(0, 23), st.sampled_from([math.nan, math.inf, -math.inf]), both)
@quick
def test_nan_and_infinity_count_by_position_and_never_by_size(
    value: Tensor, place: int, odd: float, same_code: bool
) -> None:
    other = value.clone()
    at = place % other.numel()
    before = other.view(-1)[at].item()
    other.view(-1)[at] = odd
    real = before.real if isinstance(before, complex) else before
    assume(not (math.isnan(odd) and math.isnan(real)) and real != odd)
    for pair in ((value, other), (other, value)):
        (leaf,) = compare(*pair, same_code=same_code)
        assert leaf.status is Status.MISMATCH_VALUE
        assert all(x is None or math.isfinite(x) for x in (leaf.max_abs, leaf.max_rel))


@given(floats(), st.sampled_from([1e-8, 1e-6, 1e-4, 1e-2, 1.0]), both)
@quick
def test_a_smaller_error_is_never_worse(value: Tensor, size: float, anchored: bool) -> None:
    anchor = value.to(torch.complex128 if value.is_complex() else torch.float64)
    how = {"anchor": anchor if anchored else None, "same_code": False}
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    far, near = (
        (anchor + noise * anchor.abs() * part).to(value.dtype) for part in (size, size / 4)
    )
    if status(value, far, **how).passed:
        assert status(value, near, **how).passed


@given(floats(), both)
@quick
def test_no_tolerance_reaches_the_outputs_own_size(value: Tensor, anchored: bool) -> None:
    finite = torch.where(value.isfinite(), value, torch.zeros_like(value))
    assume(bool(finite.any()))
    anchor = finite.to(torch.complex128 if value.is_complex() else torch.float64)
    how = {"anchor": anchor if anchored else None, "same_code": False}
    assert not status(finite, torch.zeros_like(finite), **how).passed
    assert not status(finite, -finite, **how).passed
    assert not status(finite, finite * 2, **how).passed


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_zeros_pass_not_even_where_the_dtype_is_coarse(dtype: torch.dtype) -> None:
    value = torch.tensor([[0.25, 1.0], [0.5, 2.0]]).to(dtype)
    assert status(value, value.float().mul(1.1).to(dtype), same_code=False).passed
    for wrong in (torch.zeros(2, 2), -value.float(), value.float() * 4):
        assert not status(value, wrong.to(dtype), same_code=False).passed


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=9), st.integers(0, 8), both)
@quick
def test_integers_of_any_size_are_exact(items: list[int], place: int, same_code: bool) -> None:
    value = torch.tensor(items)
    other = value.clone()
    other[place % len(items)] += 1
    assert status(value, value.clone(), same_code=same_code) is Status.EXACT
    assert status(value, other, same_code=same_code) is Status.MISMATCH_VALUE
    assert status(items, other.tolist(), same_code=same_code) is Status.MISMATCH_VALUE
    assert status(value > 0, value <= 0, same_code=same_code) is Status.MISMATCH_VALUE


@given(floats())
@quick
def test_a_constant_reference_is_named(value: Tensor) -> None:
    constant = value.view(-1)[0].expand(3, 4)
    (said,) = doubts(constant, [])
    assert "constant" in said
    assert bool(doubts(value, [])) == (value.numel() > 1 and len(set(map(bytes, raw(value)))) == 1)


def raw(tensor: Tensor) -> list[list[int]]:
    return tensor.reshape(-1, 1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


PATCHES: list[Any] = [
    ([[0, 2]], [1.0, 3.0]),
    ([[2, 0]], [3.0, 1.0]),
    ([[0, 2, 0]], [0.5, 3.0, 0.5]),
]


@pytest.mark.parametrize("left", PATCHES)
@pytest.mark.parametrize("right", PATCHES)
def test_sparse_tensors_that_say_the_same_are_the_same_to_another_implementation(
    left: Any, right: Any
) -> None:
    made = [torch.sparse_coo_tensor(*each, (4,), check_invariants=True) for each in (left, right)]
    deep = [{"grad": [tensor, None]} for tensor in made]
    assert status(*deep, same_code=False).passed
    assert status(*deep, same_code=True).passed == (left is right)
    wrong = made[1] * 2
    assert status(made[0], wrong, same_code=False) is Status.MISMATCH_VALUE
