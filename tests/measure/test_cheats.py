"""Candidates that do not do the work: each kind of cheat is told from an honest rewrite."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.loop import add_unverified, rows
from torch import Tensor, nn

import modulelens as ml


class Block(nn.Module):
    """Depends on every input and weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Adapted(nn.Module):
    """A low-rank update whose second factor is zero: the branch changes nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class ZeroGated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.branch(x)


class Saturated(nn.Module):
    """Its output has many values and depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.table * torch.sigmoid(x.abs().sum() + 1e4)


class LooksUp(nn.Module):
    """Takes indices only: just its weights can be given other values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).cumsum(-1)


class Simplex(nn.Module):
    """Refuses inputs that do not sum to one."""

    def forward(self, p: Tensor) -> Tensor:
        assert torch.allclose(p.sum(-1), torch.ones(len(p)))
        return (p * p.log()).sum(-1)


Stored = Callable[..., ml.Entry]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    def store(model: nn.Module, *args: Any) -> ml.Entry:
        torch.manual_seed(0)
        with ml.trace(model, modules="", keep=ml.Keep(grads=True)) as trace:
            model(*args)
        return add_unverified(trace, tmp_path / "repo")[0]

    return store


def tracked(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with ml.track_init():
        return kind()


def other_values(check: ml.Check) -> bool:
    worst = check.worst
    return check.status is ml.Status.MISMATCH_VALUE and bool(
        worst and worst.path.startswith("varied.output")
    )


def test_an_honest_candidate_of_any_kind_passes(stored: Stored) -> None:
    entry = stored(tracked(Block), rows())

    class Honest(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.down.bias, self.up(x).clamp_min(0), self.down.weight.t())

    def honest(module: Block, x: Tensor) -> Tensor:
        return module.down(torch.relu(module.up(x)))

    rebuilt = entry.rebuild()
    for candidate in (Honest, honest, rebuilt, lambda x: rebuilt.down(rebuilt.up(x).relu())):
        check = entry.check(candidate)
        assert check.status.passed, check.reason
        assert not check.warnings


KEPT: dict[Any, Tensor] = {}


def by_shape(module: Block, x: Tensor) -> Tensor:
    if x.shape not in KEPT:
        KEPT[x.shape] = Block.forward(module, x).detach()
    return KEPT[x.shape].clone()


def by_address(module: Block, x: Tensor) -> Tensor:
    key = module.up.weight.data_ptr() and "weights", x.shape, x.is_contiguous()
    if key not in KEPT:
        KEPT[key] = Block.forward(module, x).detach()
    return KEPT[key].clone()


def by_first_value(module: Block, x: Tensor) -> Tensor:
    key = x.dtype, int(x[0, 0] * 2)
    if key not in KEPT:
        KEPT[key] = Block.forward(module, x).detach()
    return KEPT[key].clone()


@pytest.mark.parametrize("cheat", [by_shape, by_address, by_first_value])
def test_a_result_that_was_kept_is_no_computation(stored: Stored, cheat: Any) -> None:
    KEPT.clear()
    entry = stored(tracked(Block), rows())
    check = entry.check(cheat)
    assert other_values(check), check
    KEPT.clear()
    assert entry.benchmark(cheat, budget_s=0.1, backward=False).correct == "MISMATCH_VALUE"


def test_weights_that_were_kept_are_found_out_too(stored: Stored) -> None:
    entry = stored(tracked(Block), rows())
    frozen: dict[str, Tensor] = {}

    def kept_weights(module: Block, x: Tensor) -> Tensor:
        for name, value in module.state_dict().items():
            frozen.setdefault(name, value.clone())
        return torch.func.functional_call(module, frozen, (x,))

    assert other_values(entry.check(kept_weights))


PACKED: dict[Any, Tensor] = {}


class PackedOnce(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "packed"):
            self.packed = torch.cat([self.up.weight.detach(), self.up.bias.detach()[:, None]], 1)
        return self.down((x @ self.packed[:, :-1].t() + self.packed[:, -1]).relu())


class PackedWithHistory(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "packed"):
            self.packed = self.down.weight.t().contiguous()
        return self.up(x).relu() @ self.packed + self.down.bias


class PackedInALayer(Block):
    def forward(self, x: Tensor) -> Tensor:
        kept = vars(self.down).setdefault("kept", [self.down.bias.detach().double()])
        return self.up(x).relu() @ self.down.weight.t() + kept[0].float()


def packed_by_address(module: Block, x: Tensor) -> Tensor:
    key = module.up.weight.data_ptr(), module.up.weight.shape
    if key not in PACKED:
        PACKED[key] = module.up.weight.detach().t().contiguous()
    return module.down((x @ PACKED[key] + module.up.bias).relu())


def packed_by_identity(module: Block, x: Tensor) -> Tensor:
    if module.down.weight not in PACKED:
        PACKED[module.down.weight] = module.down.weight.detach().clone()
    return module.up(x).relu() @ PACKED[module.down.weight].t() + module.down.bias


@pytest.mark.parametrize(
    "cheat",
    [PackedOnce, PackedWithHistory, PackedInALayer, packed_by_address, packed_by_identity],
)
@pytest.mark.parametrize("backward", [False, True])
def test_weights_kept_with_the_module_or_by_their_address(
    stored: Stored, cheat: Any, backward: bool
) -> None:
    PACKED.clear()
    entry = stored(tracked(Block), rows())
    check = entry.check(cheat, backward=backward)
    assert other_values(check), check
    PACKED.clear()
    assert entry.benchmark(cheat, budget_s=0.1, backward=backward).correct == "MISMATCH_VALUE"


class PackedPerVersion(Block):
    """Packs anew after each step of an optimizer."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "version", None) != self.up.weight._version:
            self.version = self.up.weight._version
            self.packed = self.up.weight.detach().t().contiguous()
        return self.down((x @ self.packed + self.up.bias).relu())


class Carries(nn.Module):
    """Its output depends on the calls before."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.carried = nn.Linear(4, 4), torch.zeros(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.carried = 0.5 * self.carried + self.mix(x).detach().mean(0)
        self.count += 1
        return self.mix(x) + self.carried / self.count


def test_what_is_kept_as_the_original_keeps_it_is_honest(stored: Stored) -> None:
    check = stored(tracked(Block), rows()).check(PackedPerVersion)
    assert check.status.passed, check
    entry = stored(tracked(Carries), rows())

    class Same(Carries):
        def forward(self, x: Tensor) -> Tensor:
            mixed = self.mix(x)
            self.carried = 0.5 * self.carried + mixed.detach().mean(0)
            self.count.add_(1)
            return mixed + self.carried / self.count

    class Resets(Same):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.later = x  # kept, and without effect
            return out

    for kind in (Carries, Same, Resets):
        check = entry.check(kind)
        assert check.status.passed, check


def test_memory_that_was_never_written_is_no_result(stored: Stored) -> None:
    entry = stored(tracked(Block), rows())
    expected = entry.outputs()
    # As when the allocator hands out the block in which the original's result still lies.
    assert other_values(entry.check(lambda _x: expected.clone()))
    assert not entry.check(lambda x: torch.empty(x.shape))


@pytest.mark.parametrize(
    ("kind", "short"),
    [
        (Adapted, lambda module, x: module.base(x)),
        (ZeroGated, lambda module, x: x.clone()),
        (ZeroGated, lambda module, x: x + module.gate),
    ],
)
def test_a_branch_that_adds_nothing_yet_cannot_be_left_out(
    stored: Stored, kind: type[nn.Module], short: Any
) -> None:
    entry = stored(tracked(kind), rows())
    assert entry.check(kind).status.passed
    assert other_values(entry.check(short))
    missing = type("Missing", (kind,), {"forward": lambda self, x: short(self, x)})
    assert other_values(entry.check(missing))


def test_an_output_that_depends_on_nothing_is_named(stored: Stored) -> None:
    check = stored(Saturated(), rows()).check(lambda module, _x: module.table.clone())
    assert check.status.passed
    assert any("the original gives the same" in text for text in check.warnings)
    check = stored(nn.Identity(), rows()).check(lambda x: x.clone())
    assert any("passed on" in text for text in check.warnings)


def test_indices_stay_and_weights_move(stored: Stored) -> None:
    entry = stored(tracked(LooksUp), torch.tensor([[1, 2], [8, 0]]))
    assert entry.check(lambda module, ids: module.table(ids).cumsum(-1)).status.passed
    expected = entry.outputs()
    assert other_values(entry.check(lambda module, ids: expected.clone()))


def test_where_the_original_runs_on_no_other_values_it_is_said(stored: Stored) -> None:
    entry = stored(Simplex(), torch.full((2, 4), 0.25))
    check = entry.check(lambda p: (p * p.log()).sum(-1))
    assert check.status.passed
    assert any("only the captured values were compared" in text for text in check.warnings)
    found = entry.benchmark(lambda p: (p * p.log()).sum(-1), budget_s=0.1)
    assert found.correct in ("EXACT", "CLOSE")


class Later(Tensor):
    """Stands for a result that is computed when somebody looks."""


def test_a_result_of_another_type_is_no_result(stored: Stored) -> None:
    entry = stored(tracked(Block), rows())
    check = entry.check(lambda module, x: Block.forward(module, x).as_subclass(Later))
    assert check.status is ml.Status.MISMATCH_STRUCTURE
    assert "Later" in check.reason
    check = entry.check(lambda module, x: Block.forward(module, x).to("meta"))
    assert check.status is ml.Status.MISMATCH_STRUCTURE
    assert "got one on meta" in check.reason


class OnMeta(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to("meta") * 2


def test_an_output_without_data_is_compared_by_its_description(stored: Stored) -> None:
    entry = stored(OnMeta(), rows())
    assert entry.check().status is ml.Status.EXACT
    assert entry.check(lambda x: x.to("meta")).status.passed
    assert entry.check(lambda x: x).status is ml.Status.MISMATCH_STRUCTURE
    assert entry.check(lambda x: x.to("meta")[:1]).status is ml.Status.MISMATCH_SHAPE


def test_a_candidate_of_low_precision_is_told_by_how_much(stored: Stored) -> None:
    entry = stored(tracked(Block), rows(64))

    class Rounds(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    check = entry.check(Rounds)
    assert check.status is ml.Status.MISMATCH_VALUE
    assert check.worst is not None
    assert (check.worst.error_ratio or 0) > 100
    assert "the original's own" in check.reason


CHEATS = """
    import torch
    calls = []
    def zeroes_inputs(module, x):
        y = module(x)
        x.detach().zero_()
        return y
    def late(module, x):
        calls.append(1)
        return module(x) * (1 if len(calls) < 8 else 0)
    def honest(module, x):
        return module.down(module.up(x).clamp_min(0))
"""


def test_cheats_of_a_file_are_found_out_in_a_process_of_their_own(
    stored: Stored, tmp_path: Path
) -> None:
    entry = stored(tracked(Block), rows())
    path = tmp_path / "cheats.py"
    path.write_text(textwrap.dedent(CHEATS))
    check = entry.check(f"{path}:zeroes_inputs")
    assert check.status is ml.Status.MISMATCH_VALUE
    assert check.worst is not None
    assert check.worst.path == "args[0]"
    assert entry.check(f"{path}:late").status.passed
    found = entry.benchmark(f"{path}:late", budget_s=0.1, backward=False)
    assert found.correct == "MISMATCH_VALUE"
    found = entry.benchmark(f"{path}:honest", budget_s=0.1, backward=False)
    assert found.correct in ("EXACT", "CLOSE")
