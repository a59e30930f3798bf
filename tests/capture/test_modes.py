"""The user's modes and transforms around or inside a call see the step's own operations only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import modulelens as ml
from modulelens.records import Fate


class Dispatched(TorchDispatchMode):
    """Notes each operation, and draws a random number at it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        torch.rand(())
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        torch.rand(())
        return func(*args, **(kwargs or {}))


KNOWN = ("addmm", "aten.t.", "tanh", "detach", "rand")


class Strict(TorchDispatchMode):
    """Refuses what it does not know, as quantisers and sanitizers do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not any(word in name for word in KNOWN):
            raise RuntimeError(f"unknown operation {name}")
        return func(*args, **(kwargs or {}))


class Within(nn.Module):
    """Enters a mode around its parts, and lets what the mode saw into its output."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        with self.mode() as mode:
            y = self.parts(x)
        self.seen = list(getattr(mode, "seen", ()))
        return y * (1 + len(self.seen)) + torch.rand(())


def stepped(model: Within, around: Any, trace: Any = None) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    model.zero_grad()
    with trace or torch.enable_grad(), around() as outer:
        y = model(x)
        y.sum().backward()
    seen = list(getattr(outer, "seen", ()))
    return y.detach(), x.grad, model.parts[0].weight.grad, torch.rand(2), seen, model.seen


@pytest.mark.parametrize("around", [torch.enable_grad, Dispatched, Called])
@pytest.mark.parametrize("inside", [torch.enable_grad, Dispatched, Called, Strict])
def test_modes_see_the_steps_own_operations(inside: Any, around: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Within(inside)
    plain = stepped(model, around)
    trace = ml.trace(model, name="m", keep=ml.Keep(grads=True))
    traced = stepped(model, around, trace)
    for one, two in zip(plain, traced, strict=True):
        assert one.equal(two) if isinstance(one, Tensor) else one == two
    assert not trace.warnings
    assert {c.fate for c in trace.coverage} == {Fate.RECORDED}
    entries = {e.fqn: e for e in ml.Repo(tmp_path / "repo").add(trace, verify=False)}
    assert entries["parts"].check().status is ml.Status.EXACT


def test_what_records_a_graph_records_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4)
    wanted = make_fx(lambda x: model(x))(x).code
    with ml.trace(model):
        found = make_fx(lambda x: model(x))(x).code
    assert found == wanted


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_call_inside_a_transform_has_a_reason(transform: str) -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(3, 2, 4)
    with ml.trace(model) as trace:
        if transform == "vmap":
            torch.func.vmap(model)(x)
        else:
            torch.func.grad(lambda x: model(x).sum())(x)
    assert trace.coverage[""].fate is Fate.REFUSED
    assert "torch.func" in trace.coverage[""].reason


def test_fake_tensors_are_named(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(4, 4)
    with ml.trace(model, name="m") as trace, FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(2, 4))
    with pytest.warns(UserWarning, match="fake tensor holds no values"):
        (entry,) = ml.Repo(tmp_path / "repo").add(trace)
    assert entry.rebuild().weight.equal(model.weight)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight.T, None


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(x, self.part.weight)  # type: ignore[no-any-return]


class Retries(nn.Module):
    """Its part raises first, as out of memory, and is called again; nested, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for width in (5, 7):
            try:
                self.part(torch.randn(2, width))
            except RuntimeError:
                continue
        y = self.part(x)
        try:
            self.part(y[:, :3])
        except RuntimeError:
            return self.part(y)
        return y


@pytest.mark.parametrize("make", [Frozen, Retries])
def test_gradients_of_none_and_of_calls_after_a_failed_one(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    with ml.trace(model, name="m", keep=ml.Keep(grads=True)) as trace:
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    for entry in ml.Repo(tmp_path / "repo").add(trace):
        assert entry.grade is not None
        assert entry.grade.level.value == "exact"
        assert entry.grade.param_grads in (None, "exact")
        assert entry.check(backward=True).status is ml.Status.EXACT


class Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.extra = nn.Sequential(nn.Linear(4, 4))
        return self.extra(self.part(x))


def test_modules_made_within_the_step_are_named() -> None:
    model = Swaps()
    with ml.trace(model, modules="*") as trace:
        model(torch.randn(2, 4))
    assert trace.coverage[""].fate is Fate.RECORDED
    for fqn in ("extra", "extra.0"):
        assert "within the traced step" in trace.coverage[fqn].reason
    assert [c.fqn for c in trace.coverage] == ["", "part", "extra", "extra.0"]


class Slotted(nn.Module):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Special(nn.Parameter):
    pass


class HasSpecial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Special(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    ("make", "reason", "text"),
    [(Slotted, "opaque_attribute", "__slots__"), (HasSpecial, "tensor_subclass", "Special")],
)
def test_what_cannot_be_kept_has_its_reason(
    make: Any, reason: str, text: str, tmp_path: Path
) -> None:
    model = make()
    with ml.trace(model, name="m") as trace:
        model(torch.randn(2, 4))
    with pytest.warns(UserWarning, match=reason):
        (entry,) = ml.Repo(tmp_path / "repo").add(trace)
    assert text in entry.grade.reason


@pytest.mark.parametrize(
    "options",
    [
        *({"name": name} for name in (3, b"x", True, ("a",), Path("x"))),
        *({"modules": modules} for modules in (3, None, [3])),
        *({"methods": methods} for methods in (3, None, [3])),
        *({"keep": keep} for keep in ("full", {}, ml.Keep)),
        {"warmup": "1"},
        {"steps": 1.5},
    ],
)
def test_a_wish_of_another_type_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ml.errors.UsageError, match=next(iter(options))):
        ml.trace(nn.Linear(2, 2), **options)


class Text(str):
    __slots__ = ()


def test_a_name_that_is_a_kind_of_text_is_text(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ml.trace(model, name=Text("named")) as trace:
        model(torch.randn(2, 2))
    (entry,) = ml.Repo(tmp_path / "repo").add(trace)
    assert type(entry.model) is str
    assert entry.name == "named"
