"""A tiny module traced with a `Keep`, and its entries. Knows no verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.capture.loop import add_unverified
from torch import Tensor, nn

import modulelens as ml
from modulelens.rebuild import Synthesizer, Tensors
from modulelens.records import TensorRef
from modulelens.tree import spec_of, tensors_of
from modulelens.tree.stats import value_stats

SHAPES = ml.Keep(tensors="shape", weights="shape", grads=True)


class Takes(nn.Module):
    """Takes anything and hands back the sum of what it got; it computes with every tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = tensors_of((args, kwargs))
        return torch.stack(
            [
                torch.view_as_real(t).sum() if t.is_complex() else t.double().sum()
                for t in tensors
                if t.element_size() and not t.is_sparse
            ]
        ).sum()


def traced(model: nn.Module, step: Any, repo: Path, keep: ml.Keep = SHAPES) -> dict[str, ml.Entry]:
    """The entries by fqn of one step with backward, where the output requires grad."""
    with ml.trace(model, name="m", keep=keep) as trace:
        output = step(model)
        losses = [t.sum() for t in tensors_of(output) if t.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
    return {entry.fqn: entry for entry in add_unverified(trace, repo)}


def inputs_again(repo: Path, *args: Any, seed: int = 0) -> tuple[Any, ...]:
    """The arguments as they come back where only shapes were kept."""
    entry = traced(Takes(), lambda m: m(*args), repo)[""]
    found, _ = entry.inputs(seed=seed)
    return found


def stand_in(tensor: Tensor, seed: int = 0, group: int = 0) -> Tensor:
    """A tensor of made-up values for this one, by its statistics alone."""
    ref = TensorRef(spec=spec_of(tensor), group=group, stats=value_stats(tensor))
    return Tensors(_no_storage, missing=Synthesizer(seed)).get(ref)


def _no_storage(_: TensorRef) -> torch.UntypedStorage:
    raise AssertionError("its bytes were not kept")
