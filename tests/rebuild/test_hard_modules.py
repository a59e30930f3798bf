"""What a replay depends on beside weights and inputs: it comes along, or its absence is said."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.capture.loop import add_unverified, rows, same, verify
from tests.rebuild import hard
from torch import Tensor, nn

import modulelens as ml
from modulelens.errors import ClassNotFound, NotRebuildable
from modulelens.rebuild import Payload
from modulelens.records import Metadata
from modulelens.replay import Replay
from modulelens.verify import Subject, check

Elsewhere = Callable[..., Any]


def traced(model: nn.Module, repo: Path, name: str, calls: int = 2) -> dict[str, ml.Entry]:
    """The entries of a second step, after a first one moved the state."""
    with ml.trace(model, name=name, warmup=1, keep=ml.Keep(grads=True)) as trace:
        for _ in range(calls):
            model(rows().requires_grad_()).square().sum().backward()
    return {e.fqn: e for e in add_unverified(trace, repo)}


@pytest.fixture(scope="module")
def hard_entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, ml.Entry]]:
    """All of them, graded in another process, which never saw these modules' constructors."""
    repo = tmp_path_factory.mktemp("hard")
    found = {}
    for name, build in hard.MODELS.items():
        torch.manual_seed(0)
        with ml.track_init():
            model = build()
        found[name] = traced(model, repo, name)
    verify(repo, [e for entries in found.values() for e in entries.values()])
    return found


@pytest.mark.parametrize("name", hard.MODELS)
def test_it_replays_exactly_in_another_process(
    name: str, hard_entries: dict[str, dict[str, ml.Entry]], elsewhere: Elsewhere
) -> None:
    for entry in hard_entries[name].values():
        assert entry.grade is not None
        assert entry.grade.level == "exact", (entry, entry.grade.reasons)
        assert entry.grade.buffers in (None, "exact"), entry.grade.reasons
    root = hard_entries[name][""]
    found = elsewhere("check", repo=str(root._store.root), ref=root.id, backward=True)
    assert found["status"] == "EXACT", found
    assert not found.get("warnings")


def test_measuring_moves_no_state(hard_entries: dict[str, dict[str, ml.Entry]]) -> None:
    for name in ("MovingCodebook", "PowerIteration", "WarmsUp", "OwnStreams"):
        entry = hard_entries[name][""]
        entry.benchmark(budget_s=0.02)
        entry.profile(budget_s=0.02)
        assert entry.check().status is ml.Status.EXACT
        # One module that is run again and again starts over each time as well.
        run = entry._replay().ready().run
        with run:
            for _ in range(3):
                run.fresh()
                assert same(run.forward().detach(), entry.outputs().detach())


def test_ties_are_known_inside_and_outside(hard_entries: dict[str, dict[str, ml.Entry]]) -> None:
    entries = hard_entries["TiedInParts"]
    module = entries[""].rebuild()
    assert module.head.weight is module.embed.weight is module.also.weight
    assert module.view.untyped_storage()._cdata == module.head.weight.untyped_storage()._cdata
    assert module.view.stride() == (1, 4)
    assert set(entries["head"].metadata.ties["weight"]) == {"embed.weight", "also.weight"}
    stored = sum(entries[""].metadata.blobs.values())
    assert len({r for e in entries.values() for r in e.metadata.blobs}) < 40
    assert stored < 60_000


def test_both_ways_give_a_buffer_that_was_changed_since(
    hard_entries: dict[str, dict[str, ml.Entry]],
) -> None:
    for way in ("structure", "init"):
        module = hard_entries["changed_rotary"]["0"].rebuild(strategy=way)
        assert module.frequencies.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not module.state_dict()


def local_class(factor: float) -> type[nn.Module]:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * factor

    return Local


def made_at_run_time() -> type[nn.Module]:
    return type("MadeHere", (nn.Linear,), {})


@pytest.mark.parametrize(
    ("cls", "args", "where"),
    [
        (local_class(2.0), (), "defined inside a function"),
        (made_at_run_time(), (4, 4), "at run time"),
    ],
)
def test_a_class_without_an_importable_name_is_refused_and_its_data_stay_readable(
    cls: type[nn.Module], args: tuple[int, ...], where: str, tmp_path: Path
) -> None:
    model = nn.Sequential(cls(*args), nn.Linear(4, 4))
    entries = traced(model, tmp_path / "repo", "local")
    verify(tmp_path / "repo", list(entries.values()))
    for fqn in ("0", ""):
        entry = entries[fqn]
        assert entry.grade == "no"
        assert entry.grade is not None
        code, text = entry.grade.reasons["outputs"]
        assert code == "not_importable"
        assert where in text
        assert cls.__qualname__ in text
        with pytest.raises(NotRebuildable, match=where):
            entry.rebuild()
        assert entry.check().status is ml.Status.RUNTIME_ERROR
        assert entry.inputs()[0][0].shape == (3, 4)
        assert entry.outputs().shape == (3, 4)
        kept = torch.load(entry.export(tmp_path / "file.pt"), weights_only=True)
        wanted = {f"state/{n}": p for n, p in model.get_submodule(fqn).named_parameters()}
        assert wanted.keys() <= kept.keys()
        assert all(torch.equal(kept[name], p) for name, p in wanted.items())
    assert entries["1"].grade == "exact"
    if not args:
        found = entries[""].rebuild(class_map={entries["0"].cls: local_class(2.0)})
        assert torch.equal(found(*entries[""].inputs()[0]), entries[""].outputs())


def test_a_replaced_forward_without_a_name_is_refused_by_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    unnamed = eval("lambda self, x: x + self.weight.sum()")
    model.forward = types.MethodType(unnamed, model)  # type: ignore[method-assign]
    entry = traced(model, tmp_path, "replaced")[""]
    found = entry.check()
    assert found.status is not ml.Status.MISMATCH_VALUE
    assert not found
    assert "forward" in found.reason or "lambda" in found.reason, found.reason


LAYER = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return self.layer(x)
"""
STRANGER = LAYER.replace("self.lin(x).relu()", "self.other(x)").replace(
    "self.lin =", "self.other ="
)


@pytest.fixture
def generic(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A package with a name that others have as well, and its module."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "generic_models.py").write_text(LAYER)
    sys.path.insert(0, str(home))
    importlib.invalidate_caches()
    try:
        yield home, importlib.import_module("generic_models")
    finally:
        sys.path.remove(str(home))
        del sys.modules["generic_models"]


def test_another_package_of_the_same_name_is_told_with_both_places(
    generic: tuple[Path, Any], tmp_path: Path, elsewhere: Elsewhere
) -> None:
    home, module = generic
    repo = tmp_path / "repo"
    entries = traced(module.Net(), repo, "generic")
    other = tmp_path / "other"
    other.mkdir()
    (other / "generic_models.py").write_text(STRANGER)
    for fqn in ("layer", ""):
        ref = entries[fqn].id
        found = elsewhere("check", repo=str(repo), ref=ref, path=str(other))
        assert found["status"] != "EXACT"
        (said,) = [w for w in found["warnings"] if "generic_models:Layer" in w]
        assert str(home) in said
        assert str(other / "generic_models.py") in said
        warned = elsewhere("warnings_of_rebuild", repo=str(repo), ref=ref, path=str(other))
        assert any(str(home) in w and str(other / "generic_models.py") in w for w in warned)
        # Found where it was, it is what it was.
        assert elsewhere("check", repo=str(repo), ref=ref)["status"] == "EXACT"


def test_a_class_that_moved_or_was_renamed_is_proposed(
    generic: tuple[Path, Any], tmp_path: Path, elsewhere: Elsewhere
) -> None:
    home, module = generic
    repo = tmp_path / "repo"
    entries = traced(module.Net(), repo, "moved")
    (home / "generic_blocks.py").write_text(LAYER.replace("Layer", "Block").replace("Net", "Top"))
    (home / "generic_tops.py").write_text(LAYER.replace("Net", "Top"))
    (home / "broken.py").write_text("class (:")
    (home / "generic_models.py").write_text("import torch\n")
    with pytest.raises(ClassNotFound, match="generic_models:Net is gone") as caught:
        elsewhere("rebuild", repo=str(repo), ref=entries[""].id)
    assert caught.value.did_you_mean == ("generic_tops:Top",)
    with pytest.raises(ClassNotFound) as caught:
        elsewhere("rebuild", repo=str(repo), ref=entries["layer"].id)
    assert set(caught.value.did_you_mean) == {"generic_blocks:Block", "generic_tops:Layer"}
    found = elsewhere("check", repo=str(repo), ref=entries["layer"].id)
    assert "did you mean 'generic_" in found["reason"]
    names = {"Layer": "generic_blocks:Block", "Net": "generic_tops:Top"}
    for fqn, name in (("layer", "Layer"), ("", "Net")):
        options = {"path": str(home), "class_map": names if not fqn else {name: names[name]}}
        made = elsewhere("rebuild", repo=str(repo), ref=entries[fqn].id, **options)
        assert made["cls"] == names[name]
        assert made["output"] == entries[fqn].outputs().tolist()


def doubled(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * 2


def test_a_class_that_was_patched_is_no_bare_mismatch(
    generic: tuple[Path, Any], tmp_path: Path, elsewhere: Elsewhere
) -> None:
    _, module = generic
    module.Layer.forward = doubled
    entry = traced(module.Net(), tmp_path / "repo", "patched")["layer"]
    assert entry.check().status is ml.Status.EXACT  # patched here as well
    found = elsewhere("check", repo=str(tmp_path / "repo"), ref=entry.id)
    assert found["status"] == "MISMATCH_VALUE"
    assert any("Layer ran other code than its source shows" in w for w in found["warnings"])


class KnowsItsDevice(nn.Module):
    def __init__(self, device: torch.device, device_name: str = "cuda:1") -> None:
        super().__init__()
        self.device, self.device_name = device, device_name
        self.options = {"device": "cuda", "map": "auto", "device_map": "auto", "kind": "cuda:0"}
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def moved(replay: Replay, **changes: Any) -> Replay:
    """The entry as another machine would have stored it."""
    metadata = msgspec.structs.replace(replay.metadata, **changes)
    return Replay(Payload(metadata, replay.payload.blob, replay.payload.storage))


def on_device(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        found = {k: on_device(v, device) for k, v in value.items()}
        return found | {"device": device} if "shape" in found and "dtype" in found else found
    return [on_device(v, device) for v in value] if isinstance(value, (list, tuple)) else value


def test_what_was_captured_on_another_device_runs_here_and_says_so(tmp_path: Path) -> None:
    with ml.track_init():
        model = KnowsItsDevice(torch.device("cuda:3"), device_name="cuda:2")
    entry = traced(model, tmp_path, "device")[""]
    for way in ("structure", "init"):
        module = entry.rebuild(strategy=way)
        assert module.device == torch.device("cpu")
        assert module.device_name == "cpu"
        assert module.options == model.options | {"device": "cpu"}
        assert {p.device.type for p in module.parameters()} == {"cpu"}
    raw = on_device(msgspec.to_builtins(entry.metadata), "cuda:3")
    stored = msgspec.convert(raw, Metadata)
    found = check(Subject(moved(entry._replay(), calls=stored.calls)))
    assert found.status.passed
    assert "captured on cuda, this is cpu" in found.warnings


def test_the_same_code_on_another_machine_is_held_to_a_tolerance(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))
    with ml.trace(model, name="rounds") as trace:
        model(torch.randn(64, 4))
    entry = add_unverified(trace, tmp_path)[0]
    replay = entry._replay()
    (call,) = replay.metadata.calls
    # Without oneDNN the same code rounds otherwise, as it may on another processor.
    ambient = msgspec.structs.replace(call.context.ambient, onednn=not call.context.ambient.onednn)
    context = msgspec.structs.replace(call.context, ambient=ambient)
    calls = (msgspec.structs.replace(call, context=context),)
    here = check(Subject(moved(replay, calls=calls)))
    environment = msgspec.structs.replace(replay.metadata.environment, cpu="Another CPU")
    there = check(Subject(moved(replay, calls=calls, environment=environment)))
    assert there.status.passed
    assert any("captured on Another CPU, this is" in w for w in there.warnings)
    if here.status is not ml.Status.EXACT:  # not every processor shows a difference
        assert here.status is ml.Status.MISMATCH_VALUE
        assert there.status is ml.Status.CLOSE
        assert "the original's own" in there.reason
    assert check(Subject(moved(replay, environment=environment))).status is ml.Status.EXACT


class ShiftedInside(hard.ScaledOutside):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_capture_begins_inside_a_call_of_the_class_s_own(
    hard_entries: dict[str, dict[str, ml.Entry]],
) -> None:
    entry = hard_entries["HandsShift"]["layer"]
    live = entry.rebuild()
    (x,), kwargs = entry.inputs()
    assert kwargs == {}
    assert same(entry.run(), entry.outputs())
    assert same(entry.run(live), nn.Linear.forward(live, x))
    assert same(live(x, shift=0.0), entry.outputs() * 2)
    for candidate in (hard.ScaledOutside, live, nn.Linear, lambda module, x: module.forward(x)):
        assert entry.check(candidate, backward=True).status is ml.Status.EXACT
    for candidate in (ShiftedInside, lambda module, x: module(x)):
        assert entry.check(candidate).status is ml.Status.MISMATCH_VALUE
    assert entry.check(nn.Sequential(live)).status is ml.Status.MISMATCH_VALUE
    assert entry.benchmark(hard.ScaledOutside, budget_s=0.1).correct
