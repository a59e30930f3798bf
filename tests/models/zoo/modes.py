"""The ways in which every architecture is run. Knows no tracing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.models.harness import Case
from tests.models.zoo.architecture import Architecture, Build, Step
from torch import Tensor, nn


def train(of: Architecture) -> Case:
    """A step with backward and the optimizer's."""
    return Case(f"{of.name}, train", of.build, of.loss)


def evaluate(of: Architecture) -> Case:
    """Without gradients; of a generation, a forward that has a filled cache."""
    step = without_gradients(of.infer or of.loss)
    return Case(f"{of.name}, eval", of.build, step, train=False, warmup=of.prompts)


def bf16(of: Architecture) -> Case:
    """A training step under autocast."""
    return Case(f"{of.name}, bf16", of.build, under_autocast(of.loss))


def checkpointed(of: Architecture) -> Case:
    """A training step that computes activations again in its backward."""
    return Case(f"{of.name}, checkpoint", recomputing(of.build), of.loss)


def compiled(of: Architecture) -> Case:
    """Three training steps of the model under Dynamo, of which the second one is traced."""

    def build() -> nn.Module:
        return torch.compile(of.build(), backend="eager")

    return Case(f"{of.name}, compile", build, of.loss, warmup=1, steps=3, eager=1)


MODES: dict[str, Callable[[Architecture], Case]] = {
    "train": train,
    "eval": evaluate,
    "bf16": bf16,
    "checkpoint": checkpointed,
    "compile": compiled,
}


def left_out(mode: str, of: Architecture) -> str:
    """Why a mode does not apply to an architecture; empty where it does."""
    if mode in of.without:
        return of.without[mode]
    if mode == "checkpoint" and not _recomputes(of.build()):
        return "the model offers no activation checkpointing"
    return ""


def without_gradients(step: Step) -> Step:
    """The same under `no_grad`."""

    def evaluated(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return step(model)

    return evaluated


def under_autocast(step: Step) -> Step:
    """The same step under bf16 autocast."""

    def autocast(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model)

    return autocast


def recomputing(build: Build) -> Build:
    """The same model with activation checkpointing."""

    def built() -> nn.Module:
        model = build()
        if hasattr(model, "checkpointing"):
            model.checkpointing = True
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return built


def _recomputes(model: nn.Module) -> bool:
    own = hasattr(model, "checkpointing")
    return own or getattr(model, "supports_gradient_checkpointing", False)
