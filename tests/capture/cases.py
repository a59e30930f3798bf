"""Every module of the zoo with a step of it, and what is expected of its entries."""

from __future__ import annotations

import torch
from tests.capture import zoo
from tests.capture.loop import Case, rows
from torch import nn


def hooked_by_stranger() -> nn.Module:
    class Stranger:
        def __call__(self, module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
            return out + 1

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(Stranger())
    return model


def hooked_by_lambda() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda _m, _a, out: out + 1)
    return model


def hooked_by_function() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_pre_hook(zoo.add_one_before)
    model[1].register_forward_hook(zoo.add_two_after)
    return model


def in_inference_mode(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(rows())


def under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(rows())


def with_float64_default(model: nn.Module) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return model(rows()).float()
    finally:
        torch.set_default_dtype(torch.float32)


class MakesConstants(nn.Module):
    """Depends on the process's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.tensor(1 / 3)


def norm(make: object, **kwargs: object) -> nn.Module:
    return nn.Sequential(make(nn.Linear(4, 4), **kwargs), nn.Tanh())  # type: ignore[operator]


def wide(n: int = 2) -> torch.Tensor:
    return rows(n * 3, 8).reshape(n, 3, 8)


LINEAR = torch.nn.utils.parametrizations
CASES: dict[str, Case] = {
    "TiedWeights": Case(zoo.TiedWeights, lambda m: m(torch.tensor([1, 2, 2]))),
    "CalledTwice": Case(zoo.CalledTwice),
    "KwargsOnly": Case(zoo.WithKwargsOnly),
    "InplaceOnInput": Case(zoo.InplaceOnInput),
    "ContainerMutated": Case(zoo.HandsContainers),
    "SharedChild": Case(zoo.SharedChild),
    "ParentReference": Case(zoo.ParentReference),
    "ParentWeight": Case(zoo.ParentWeight, spoiled={"child": "ancestor"}),
    "PlainListOfModules": Case(zoo.PlainListOfModules),
    "NonPersistentBuffer": Case(zoo.NonPersistentBuffer),
    "PythonCounter": Case(zoo.CountsInChild),
    "LambdaAttribute": Case(zoo.LambdaAttribute),
    "ModuleAsArgument": Case(
        lambda: zoo.ModuleAsArgument(nn.Linear(4, 4)), spoiled={"layer": "gradient_side_channel"}
    ),
    "GeneratorArgument": Case(lambda: zoo.GeneratorArgument(nn.Linear(4, 4) for _ in range(2))),
    "OwnGenerator": Case(zoo.HandsGenerator),
    "DataclassIO": Case(zoo.DataclassIO),
    "CacheMutated": Case(zoo.CacheMutated),
    # Its first run is without gradients: those come from the recomputed run, which is no call.
    "CheckpointedReentrant": Case(
        lambda: zoo.Checkpointed(True),
        ungraded=("body", "body.0", "body.2"),
    ),
    "CheckpointedOtherwise": Case(lambda: zoo.Checkpointed(False)),
    "SameTensorThrice": Case(zoo.SameTensorThrice, lambda m: m(wide())),
    "OverlappingViews": Case(zoo.OverlappingViews),
    "ChannelsLast": Case(zoo.ChannelsLast, lambda m: m(rows(6, 25).reshape(2, 3, 5, 5))),
    "ThreeStreams": Case(zoo.DrawsTwice),
    "AutocastInside": Case(zoo.AutocastInside),
    "AutocastOutside": Case(zoo.CalledTwice, under_autocast, spoiled={"layer": "order of a sum"}),
    "GradModes": Case(zoo.GradModes),
    "InferenceMode": Case(zoo.NonPersistentBuffer, in_inference_mode, train=False, learn=False),
    "DefaultDtype": Case(MakesConstants, with_float64_default),
    "CtcAsFunction": Case(lambda: zoo.CtcTrained(False)),
    "CtcAsModule": Case(lambda: zoo.CtcTrained(True)),
    "PackedRecurrent": Case(zoo.PackedRecurrent),
    "OwnParameters": Case(zoo.OwnParameters),
    "ViewAttribute": Case(zoo.MovesItsState),
    "ReplacedForward": Case(zoo.ReplacedForward),
    "HooksItself": Case(zoo.HooksItself),
    "HookedByLambda": Case(hooked_by_lambda),
    "HookedByStranger": Case(hooked_by_stranger, spoiled={"": "foreign_hook"}),
    "HookedByFunction": Case(hooked_by_function),
    "DataclassModule": Case(lambda: zoo.DataclassModule(4)),
    "OwnNew": Case(lambda: zoo.OwnNew(4)),
    "StrictAttributes": Case(zoo.StrictAttributes),
    "StarArguments": Case(lambda: zoo.StarArguments(4, 6, 4, bias=False)),
    "ConsumesConfig": Case(lambda: zoo.ConsumesConfig({"act": torch.tanh, "limit": 0.5}, [4, 4])),
    "OddNames": Case(zoo.OddNames),
    "OddArguments": Case(zoo.OddArguments),
    "OpaqueOutput": Case(zoo.ReturnsIterator, spoiled={"inner": "opaque_output"}),
    "SideChannel": Case(zoo.SideChannel, spoiled={"inner": "gradient_side_channel"}),
    "CallerWrites": Case(zoo.CallerWrites),
    # The gradient of a nested output is not kept, so that of the weight cannot be found again.
    "SparseAndNested": Case(zoo.SparseAndNested, ungraded=("nested",)),
    "LowPrecision": Case(zoo.LowPrecision),
    "EmptyBatch": Case(zoo.EmptyBatch),
    "CallsAnotherMethod": Case(zoo.CallsAnotherMethod),
    "SlowPathEncoder": Case(zoo.SlowPathEncoder, lambda m: m(wide()), train=False, learn=False),
    "TrainedEncoder": Case(zoo.SlowPathEncoder, lambda m: m(wide())),
    "SwitchesMode": Case(zoo.SwitchesMode),
    "MomentumEncoder": Case(zoo.MomentumEncoder),
    "SwitchesModeBelow": Case(zoo.SwitchesModeBelow, learn=False),
    "TunesBelow": Case(zoo.TunesBelow, learn=False),
    "Unregistered": Case(zoo.Unregistered),
    "WaitedAt": Case(zoo.WaitedAt, learn=False),
    "SavesItself": Case(zoo.SavesItself),
    "CatchesInside": Case(zoo.CatchesInside),
    "BatchNorm": Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())),
    "SpectralNorm": Case(lambda: norm(LINEAR.spectral_norm)),
    "WeightNorm": Case(lambda: norm(LINEAR.weight_norm)),
    "OldSpectralNorm": Case(lambda: norm(nn.utils.spectral_norm)),
    "OldWeightNorm": Case(lambda: norm(nn.utils.weight_norm)),
    "Lazy": Case(lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh()), warmup=1),
    "LazyFirstCall": Case(
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh()),
        learn=False,
        spoiled={"": "uninitialized"},
    ),
    "BuiltBefore": Case(zoo.CalledTwice, track=False),
    "MultiheadCopies": Case(lambda: nn.Transformer(8, 2, 1, 1, 16), lambda m: m(wide(), wide())),
    "ScriptedChild": Case(
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Tanh()),
        spoiled={"": "script", "0": "script"},
    ),
}
