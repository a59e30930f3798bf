"""An argument counts as changed when its values changed, not when a kernel took its pages."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import modulelens as ml
from modulelens.capture import hook


class TakesPages(nn.Module):
    """Asks for a writable pointer, as fused kernels do, and writes nothing."""

    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        for tensor in (x, *more):
            tensor.data_ptr()
        return x + sum(more)


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        return x + more[0].add_(1)


class Appends(nn.Module):
    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        more.append(x)
        return x * 2


class WritesTheSame(nn.Module):
    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        return x.copy_(x.clone()) + more[0]


class Resizes(nn.Module):
    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        return x.unsqueeze_(0) + more[0]


@pytest.mark.parametrize(
    ("module", "changed"),
    [
        (TakesPages, ()),
        (WritesTheSame, ()),
        (AddsInPlace, ("args[1]",)),
        (Appends, ("args[1]",)),
        (Resizes, ("args[0]",)),
    ],
)
def test_only_arguments_with_other_values_count_as_changed(
    module: Callable[[], nn.Module], changed: tuple[str, ...], tmp_path: Any
) -> None:
    with ml.trace(module()) as trace:
        trace.model(torch.ones(3), [torch.ones(3)])
    (entry,) = ml.Repo(tmp_path / "repo").add(trace, verify=False)
    assert entry.metadata.calls[0].mutated == changed
    assert (entry.metadata.calls[0].args_after is not None) == bool(changed)


def test_a_single_argument_whose_pages_were_taken_is_not_changed(tmp_path: Any) -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.data_ptr()
            return x + 1

    with ml.trace(Alone()) as trace:
        trace.model(torch.ones(3))
    assert trace.captures[0].calls[0].args_after is None


class Workspace(nn.Module):
    """Writes into memory that it frees and grows, as sharding frameworks and kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.buffer = torch.zeros(3, 4)
        self.part = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        first = self.part(self.buffer).sum()
        self.buffer.untyped_storage().resize_(0)
        kept = self.part(self.lin(x))
        self.buffer.untyped_storage().resize_(self.buffer.numel() * 4)
        torch.mul(x, 2, out=self.buffer)
        grown = self.part(self.buffer) + first
        self.buffer = self.buffer.resize_(0).resize_(3, 4).copy_(grown.detach())
        self.buffer.resize_as_(torch.zeros(30, 4)).fill_(1).resize_(3, 4)
        return kept + grown


def test_memory_that_is_freed_and_grown_is_the_users_own(tmp_path: Path) -> None:
    gc.collect()
    others = len(hook._guards)  # traces that other tests left for the collector
    torch.manual_seed(0)
    plain = Workspace()
    model = copy.deepcopy(plain)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    wanted = plain(x), plain(y)
    with ml.trace(model, name="w") as trace:
        assert model(x).equal(wanted[0])
    y.untyped_storage().resize_(400)
    model.buffer.resize_(400)
    model.buffer.resize_(3, 4)
    assert model(y).equal(wanted[1])
    entries = {e.fqn: e for e in ml.Repo(tmp_path / "repo").add(trace, verify=False)}
    assert entries["lin"].check()
    assert entries["part"].check()
    assert entries["part"].outputs(call=0).equal(torch.zeros(3, 4))
    assert entries["part"].outputs(call=2).equal(x * 2)
    del trace, entries
    gc.collect()
    assert len(hook._guards) == others
    assert others or "resize_" not in vars(torch.Tensor)


def _layouts() -> dict[str, tuple[Tensor, Tensor]]:
    small, large = torch.eye(3), torch.eye(5)
    return {
        "coo": (small.to_sparse(), large.to_sparse()),
        "csr": (small.to_sparse_csr(), large.to_sparse_csr()),
        "meta": (small.to("meta"), large.to("meta")),
        "strided": (small.clone(), large.clone()),
    }


class Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["coo", "csr", "meta", "strided"])
def test_what_shares_no_memory_is_resized_as_ever(layout: str) -> None:
    small, large = _layouts()[layout]
    with ml.trace(nn.Identity()) as trace:
        trace.model(torch.ones(2))
        with Noting() as noting:
            small.resize_as_(large)
    assert small.shape == large.shape
    assert noting.seen == ["resize_as_"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transformed_tensor_is_resized_as_ever() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape).resize_as_(x) + 2 * x

    with ml.trace(nn.Identity()) as trace:
        trace.model(torch.ones(2))
        found = torch.func.vmap(doubled)(torch.ones(3, 2))
    assert found.equal(torch.full((3, 2), 2.0))
