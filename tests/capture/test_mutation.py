"""An argument counts as changed when its values changed, not when a kernel took its pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modulelens as ml


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
