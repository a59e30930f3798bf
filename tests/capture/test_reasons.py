"""What was not called has a reason that says what ran instead, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, faults, graded, rows, same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import modulelens as ml
from modulelens.errors import NotRebuildable
from modulelens.records import Fate

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Ops(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()


def in_a_model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2)).eval()


def with_own_hook() -> nn.Module:
    model = in_a_model()
    model[0].register_forward_pre_hook(zoo.add_one_before)
    return model


FUSED = [encoder_layer, in_a_model, with_own_hook]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("make", FUSED)
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_fused_path_stays_fused_and_its_parts_say_so(
    make: Callable[[], nn.Module], warmup: int, tmp_path: Path
) -> None:
    model, x = make(), rows(6, 8).reshape(2, 3, 8)

    def operators(trace: ml.Trace | None = None) -> list[str]:
        with torch.no_grad(), Ops() as seen:
            model(x)
        return [name for name in seen.names if "transformer_encoder_layer" in name]

    plain = operators()
    assert plain
    with ml.trace(model, warmup=warmup) as trace:
        for _ in range(warmup + 1):
            assert operators(trace) == plain
    parts = [c for c in trace.coverage if ".linear1" in f".{c.fqn}" or "self_attn.out" in c.fqn]
    assert {c.fate for c in parts} == {Fate.BYPASSED}
    assert all("TransformerEncoderLayer) ran as one fused operation" in c.reason for c in parts)
    assert not any(faults(e.grade) for e in graded(trace, tmp_path).values())


def test_a_container_says_what_to_ask_for() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.named = nn.ModuleDict({"last": nn.Tanh()})
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * self.scales[0]
            return self.named["last"](x)

    with ml.trace(Holds()) as trace:
        trace.model(rows()).sum().backward()
    said = {c.fqn: c.reason for c in trace.coverage if c.fate is Fate.NOT_CALLED}
    assert said == {
        "layers": "it has no forward; it holds layers.0, layers.1",
        "named": "it has no forward; it holds named.last",
        "scales": "it has no forward; it holds scales.0",
    }


def test_what_is_not_registered_is_named_and_kept(tmp_path: Path) -> None:
    model = nn.Sequential(zoo.Unregistered())
    with ml.trace(model, keep=ml.Keep(grads=True)) as trace:
        model(rows()).sum().backward()
    (text,) = trace.warnings
    assert text.endswith("only: 0.heads[0], 0.heads[1], 0.by_name['a'], 0.pair[0], 0.hidden")
    entries = graded(trace, tmp_path)
    assert {e.fqn: faults(e.grade) for e in entries.values()} == dict.fromkeys(entries, "")
    assert entries.keys() == {"", "0", "0.kept"}
    rebuilt = entries["0"].rebuild()
    assert same(rebuilt.heads[0].weight.detach(), model[0].heads[0].weight.detach())
    assert rebuilt.alias[0] is rebuilt.kept


def test_what_threads_wait_at_is_made_anew(tmp_path: Path) -> None:
    model = nn.Sequential(zoo.WaitedAt())
    with ml.trace(model) as trace:
        model(rows())
    entries = graded(trace, tmp_path)
    assert not any(faults(e.grade) for e in entries.values())
    assert entries["0"].rebuild().barrier.parties == 1


def test_a_one_shot_iterator_is_named_and_not_used_up(tmp_path: Path) -> None:
    with ml.track_init():
        model = zoo.GeneratorArgument(nn.Linear(4, 4) for _ in range(3))
    assert len(model.layers) == 3
    with ml.trace(model) as trace:
        model(rows())
    entry = add_unverified(trace, tmp_path / "repo")[0]
    assert entry.metadata.init is not None
    assert "one-shot iterator" in str(entry.metadata.init.args)
    assert len(entry.rebuild().layers) == 3


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4)))  # type: ignore[no-any-return]


def traced_by_torch() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(4, 4)), rows())  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [scripted, traced_by_torch])
def test_a_script_is_recorded_at_its_boundary_and_refused_by_name(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(make(), nn.Tanh()))
    with ml.trace(model, keep=ml.Keep(grads=True)) as trace:
        seen = model(rows())
        seen.sum().backward()
    inside = trace.coverage["1.0.0"]
    assert inside.fate is Fate.BYPASSED
    assert "is a script" in inside.reason
    entries = graded(trace, tmp_path)
    exact = {fqn for fqn, e in entries.items() if not faults(e.grade)}
    assert exact == {"0", "1.1"}
    for fqn in entries.keys() - exact:
        entry = entries[fqn]
        with pytest.raises(NotRebuildable, match=r"1\.0: a ScriptModule") as caught:
            entry.rebuild()
        assert caught.value.reason == "script"
        assert entry.inputs()[0][0].shape == entry.outputs().shape
        assert entry.grads()["outputs"].keys() == {"0"}
    assert same(entries["1.1"].inputs()[0][0], entries["1.0"].outputs())
