"""Made-up values have the captured distribution and hold what held for the captured ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.keep.loop import stand_in
from torch import Tensor

from modulelens.rebuild import Synthesizer, Tensors
from modulelens.records import TensorRef, ValueStats
from modulelens.tree import spec_of
from modulelens.tree.stats import few_valued, value_stats

SEEDS = range(4)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=drawn(seed))


FLOATS = {
    "normal": normal(300, 50) * 3 + 1,
    "positive": normal(300, 50).exp(),
    "heavy tails": normal(300, 50) ** 5,
    "two clusters": torch.where(normal(300, 50) > 0, normal(300, 50) + 9, normal(300, 50) - 9),
    "half zeros": normal(300, 50).relu(),
    "bfloat16": normal(300, 50).bfloat16(),
    "float8": normal(300, 50).to(torch.float8_e4m3fn),
    "float64 far away": normal(300, 50).double() * 1e-9 + 1e6,
    "complex": torch.complex(normal(300, 50), normal(300, 50, seed=1)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_tensor_keeps_its_distribution(name: str) -> None:
    values = FLOATS[name]
    made = stand_in(values)
    assert made.dtype is values.dtype
    assert made.shape == values.shape
    if values.is_complex():
        values, made = torch.view_as_real(values), torch.view_as_real(made)
    real, fake = values.double(), made.double()
    spread = float(real.std())
    assert real.min() <= fake.min()
    assert fake.max() <= real.max()
    assert abs(float(fake.mean() - real.mean())) < 0.1 * spread
    assert float(fake.std()) == pytest.approx(spread, rel=0.2)
    assert float((fake == 0).double().mean()) == pytest.approx(
        float((real == 0).double().mean()), abs=0.02
    )


RANGES = [
    *((dtype, low) for dtype in (torch.int64, torch.int32, torch.int16) for low in (0, 5, -7)),
    (torch.uint8, 5),
    (torch.int64, 1 << 40),
]


@pytest.mark.parametrize(("dtype", "low"), RANGES)
def test_indices_stay_in_their_range(dtype: torch.dtype, low: int) -> None:
    ids = (torch.rand(5000, generator=drawn(0)) ** 4 * 90).to(dtype) + low
    for seed in SEEDS:
        made = stand_in(ids, seed)
        assert made.dtype is dtype
        assert ids.min() <= made.min()
        assert made.max() <= ids.max()
        # Skewed as captured: frequent rows of a table stay frequent.
        assert abs(float(made.double().mean() - ids.double().mean())) < 5


ORDERED = {
    "offsets": torch.cat([torch.zeros(1), torch.rand(999, generator=drawn(1)).mul(9).floor()])
    .cumsum(0)
    .long(),
    "strictly ascending": torch.rand(500, generator=drawn(2))
    .mul(4)
    .floor()
    .long()
    .add(1)
    .cumsum(0),
    "consecutive": torch.arange(7, 700),
    "descending batch sizes": torch.rand(400, generator=drawn(3))
    .mul(30)
    .long()
    .sort()
    .values.flip(0),
    "sorted in each row": torch.rand((40, 30), generator=drawn(4)).mul(99).long().sort(-1).values,
    "positions in each row": torch.arange(64).repeat(10, 1),
    "float boundaries": torch.rand(300, generator=drawn(5)).sort().values,
}


@pytest.mark.parametrize("name", ORDERED)
def test_sorted_stays_sorted(name: str) -> None:
    values = ORDERED[name]
    strict = bool((values.diff(dim=-1) > 0).all())
    for seed in SEEDS:
        made = stand_in(values, seed)
        steps = made.diff(dim=-1) * (-1 if "descending" in name else 1)
        assert bool(
            (steps > 0).all() if strict and values.dtype is torch.long else (steps >= 0).all()
        )
        assert values.min() <= made.min()
        assert made.max() <= values.max()
    if values.dim() == 1 and "descending" not in name:
        assert (made[0], made[-1]) == (values[0], values[-1])
    if name == "consecutive" or name.startswith("positions"):
        assert made.equal(values)


def test_lengths_keep_their_sum() -> None:
    for top in (1, 3, 50, 10_000):
        lengths = torch.rand(3000, generator=drawn(top)).pow(3).mul(top + 1).long()
        for seed in SEEDS:
            made = stand_in(lengths, seed)
            assert made.sum() == lengths.sum()
            assert made.min() >= lengths.min()
            assert made.max() <= lengths.max()


@pytest.mark.parametrize("shape", [(257,), (9, 33)])
def test_a_permutation_stays_one(shape: tuple[int, ...]) -> None:
    order = torch.rand(shape, generator=drawn(0)).argsort(-1)
    made = [stand_in(order, seed) for seed in SEEDS]
    for one in made:
        assert one.sort(-1).values.equal(order.sort(-1).values)
    assert not made[0].equal(made[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_probabilities_sum_to_one(dtype: torch.dtype) -> None:
    scores = normal(50, 12)
    sparse = scores.masked_fill(scores < 0.5, -torch.inf)
    sparse[:, 0] = 1.0
    for captured in (scores.softmax(-1).to(dtype), sparse.softmax(-1).to(dtype)):
        made = stand_in(captured)
        assert made.min() >= 0
        assert torch.allclose(made.double().sum(-1), torch.ones(50, dtype=torch.float64), atol=0.03)


def masked(kind: str, rows: int = 400, width: int = 3) -> Tensor:
    """A mask in which no row is masked altogether, though nearly all of it is."""
    hidden = torch.rand((rows, width), generator=drawn(0)) < 0.8
    hidden[torch.arange(rows), torch.randint(width, (rows,), generator=drawn(1))] = False
    lowest = torch.finfo(torch.float32).min
    return {
        "true where hidden": hidden,
        "true where seen": ~hidden,
        "additive": torch.zeros(rows, width).masked_fill(hidden, -torch.inf),
        "additive, finite": torch.zeros(rows, width).masked_fill(hidden, lowest),
        "multiplied": (~hidden).to(torch.bfloat16),
        "scores": normal(rows, width).masked_fill(hidden, -torch.inf),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "true where hidden",
        "true where seen",
        "additive",
        "additive, finite",
        "multiplied",
        "scores",
    ],
)
def test_no_row_of_a_mask_is_masked_altogether(kind: str) -> None:
    mask = masked(kind)
    for seed in SEEDS:
        made = stand_in(mask, seed)
        if kind != "scores":
            assert set(made.unique().tolist()) <= set(mask.unique().tolist())
        hidden = made if kind == "true where hidden" else ~made.bool()
        if "additive" in kind or kind == "scores":
            hidden = made < -1e30
            assert not made.softmax(-1).isnan().any()
        assert not hidden.all(-1).any()
        share = float(hidden.double().mean())
        assert share == pytest.approx(0.53, abs=0.12)


def test_a_mask_with_masked_rows_may_have_them_again() -> None:
    mask = torch.zeros(300, 2).masked_fill(
        torch.rand((300, 2), generator=drawn(0)) < 0.5, -torch.inf
    )
    assert mask.isinf().all(-1).any()
    assert stand_in(mask).isinf().all(-1).any()


def test_strides_and_expanded_and_overlapping_views_are_kept() -> None:
    image = normal(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (
        image,
        normal(6, 4).t(),
        normal(3, 1, 4).expand(3, 7, 4),
        normal(12).unfold(0, 4, 2),
        normal(8, 8)[::2, 1::3],
        torch.tensor(2.5),
        torch.zeros(0, 3),
    ):
        made = stand_in(tensor)
        assert made.shape == tensor.shape
        assert made.stride() == tensor.stride()
        assert made.isfinite().all()
    assert stand_in(torch.tensor(2.5)) == 2.5


def test_an_empty_tensor_has_no_statistics() -> None:
    for shape in ((0,), (0, 4), (3, 0)):
        assert value_stats(torch.zeros(shape)) == ValueStats()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nothing_finite_is_no_error(value: float) -> None:
    made = stand_in(torch.full((4, 5), value))
    assert made.shape == (4, 5)
    assert not made.isnan().any()


def test_the_same_seed_gives_the_same_in_any_order_and_another_one_does_not() -> None:
    refs = [
        TensorRef(spec=spec_of(t), group=g, stats=value_stats(t))
        for g, t in enumerate((normal(30), normal(30), normal(5, 6)))
    ]

    def make(seed: int, order: list[TensorRef]) -> list[Tensor]:
        tensors = Tensors(lambda _: torch.UntypedStorage(0), missing=Synthesizer(seed))
        made = {ref.group: tensors.get(ref) for ref in order}
        return [made[ref.group] for ref in refs]

    before = torch.get_rng_state()
    first, again, other = make(0, refs), make(0, refs[::-1]), make(1, refs)
    assert torch.get_rng_state().equal(before)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not any(a.equal(b) for a, b in zip(first, other, strict=True))
    assert not first[0].equal(first[1])


def test_statistics_of_an_old_entry_still_make_a_tensor() -> None:
    stats = ValueStats(min=-1.0, max=2.0, mean=0.5, std=0.3, zeros=0.25, nans=0.0)
    ref = TensorRef(spec=spec_of(torch.zeros(40, 50)), group=3, stats=stats)
    made = Tensors(lambda _: torch.UntypedStorage(0), missing=Synthesizer(0)).get(ref)
    assert -1 <= made.min() <= made.max() <= 2
    assert float(made.mean()) == pytest.approx(0.375, abs=0.05)


def test_few_valued_is_told_from_many() -> None:
    assert few_valued(torch.eye(50))
    assert few_valued(torch.full((4,), torch.nan))
    assert few_valued(torch.zeros(3, 100_000).index_fill(1, torch.tensor([99_999]), 7.0))
    assert few_valued(torch.ones(5, dtype=torch.complex64))
    assert not few_valued(normal(50))
    assert not few_valued(torch.tensor([1.0, 2.0, 3.0]))
    late = torch.zeros(200_000)
    late[-100:] = normal(100)
    assert not few_valued(late)


def test_a_large_table_is_drawn_in_blocks() -> None:
    table = torch.rand((3000, 1000), generator=drawn(0)).sub(0.5)
    made = stand_in(table)
    assert float(made.std()) == pytest.approx(float(table.std()), rel=0.05)
    assert not made[0].equal(made[-1])


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


def values_of(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Float64 values of small whole or real numbers, arranged in some way."""
    real = torch.randn(shape, generator=drawn(seed), dtype=torch.float64)
    whole = (real.abs() * 3).round()
    last = shape[-1] if shape else 1
    return {
        "real": real,
        "whole": whole,
        "masked": whole.masked_fill(real < 0.5, 0.0).clamp(max=1),
        "sorted": whole.sort(-1).values if shape else whole,
        "falling": whole.sort(-1, descending=True).values if shape else whole,
        "permuted": real.argsort(-1).double() if shape else whole,
        "consecutive": torch.arange(last, dtype=torch.float64).expand(shape or (1,)),
        "constant": torch.full(shape, 2.0, dtype=torch.float64),
    }[kind]


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(
        ["real", "whole", "masked", "sorted", "falling", "permuted", "consecutive", "constant"]
    ),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_stand_in_is_of_the_kind_of_its_tensor(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, turned: bool, seed: int
) -> None:
    captured = values_of(kind, shape, seed).to(dtype)
    if turned and captured.dim() > 1:
        captured = captured.transpose(0, -1).contiguous().transpose(0, -1)
    made = stand_in(captured, seed)
    assert (made.shape, made.stride(), made.dtype) == (
        captured.shape,
        captured.stride(),
        captured.dtype,
    )
    if not captured.numel():
        return
    real, fake = captured.double(), made.double()
    assert fake.isfinite().all()
    assert real.min() <= fake.min()
    assert fake.max() <= real.max()
    assert stand_in(captured, seed).equal(made)
    if captured.dim() and captured.shape[-1] > 1:
        if captured.dim() > 1 or dtype.is_floating_point:  # else their sum is what counts
            # No row reaches less far up or down than every captured row did.
            assert fake.amax(-1).min() >= real.amax(-1).min()
            assert fake.amin(-1).max() <= real.amin(-1).max()
        if (real.diff(dim=-1) >= 0).all():
            assert (fake.diff(dim=-1) >= 0).all()
        elif (real.diff(dim=-1) <= 0).all():
            assert (fake.diff(dim=-1) <= 0).all()
        elif not dtype.is_floating_point and kind == "permuted" and dtype is not torch.bool:
            assert fake.sort(-1).values.equal(real.sort(-1).values)
    rising = captured.dim() == 1 and bool((real.diff() >= 0).all())
    if not dtype.is_floating_point and captured.dim() < 2 and real.min() >= 0 and not rising:
        assert fake.sum() == real.sum()
