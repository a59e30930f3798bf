"""Both ways of rebuilding give the same module where both work; where one does not, it says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.capture import zoo
from tests.capture.cases import CASES
from tests.capture.loop import add_unverified, build, rows, run, same
from torch import nn

import modulelens as ml
from modulelens.errors import NotFound, NotRebuildable, UsageError
from modulelens.rebuild import Payload
from modulelens.replay import Replay
from modulelens.verify import Subject, check

BOTH = [
    *("TiedWeights", "CalledTwice", "KwargsOnly", "SharedChild", "PlainListOfModules"),
    *("NonPersistentBuffer", "PythonCounter", "ModuleAsArgument", "OwnParameters", "ViewAttribute"),
    *("DataclassModule", "OwnNew", "StrictAttributes", "StarArguments", "BatchNorm", "OddNames"),
    *("LowPrecision", "SwitchesMode", "OwnGenerator", "DataclassIO"),
]


def entries_of(name: str, repo: Path) -> dict[str, ml.Entry]:
    case = CASES[name]
    trace = ml.trace(case_model := build(case), name=name, keep=ml.Keep(grads=True))
    run(case, case_model, trace)
    return {entry.fqn: entry for entry in add_unverified(trace, repo)}


@pytest.mark.parametrize("name", BOTH)
def test_both_ways_give_the_same_module(name: str, tmp_path: Path) -> None:
    for entry in entries_of(name, tmp_path / "repo").values():
        for call in range(len(entry.metadata.calls)):
            made = [entry.rebuild(strategy=way, call=call) for way in ("structure", "init")]
            left, right = made
            assert type(left) is type(right)
            assert [n for n, _ in left.named_modules()] == [n for n, _ in right.named_modules()]
            assert same(dict(left.named_buffers()), dict(right.named_buffers()))
            assert same(dict(left.named_parameters()), dict(right.named_parameters()))
            assert [m.training for m in left.modules()] == [m.training for m in right.modules()]
            assert not any(p.is_meta for module in made for p in module.state_dict().values())
            ties = [
                [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
                for module in made
            ]
            assert [ids.index(i) for ids in ties[:1] for i in ids] == [
                ids.index(i) for ids in ties[1:] for i in ids
            ]


def test_a_module_without_a_constructor_record_is_rebuilt_by_structure_only(tmp_path: Path) -> None:
    model = zoo.GeneratorArgument(nn.Linear(4, 4) for _ in range(2))
    with ml.trace(model) as trace:
        model(rows())
    entry = add_unverified(trace, tmp_path / "repo")[0]
    assert len(entry.rebuild().layers) == 2
    with pytest.raises(NotRebuildable, match="its constructor call is not known") as caught:
        entry.rebuild(strategy="init")
    assert caught.value.reason == "not_kept"
    with pytest.raises(UsageError, match="use 'init' or 'structure'"):
        entry.rebuild(strategy="pickle")


def test_rebuilding_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    entry = entries_of("TrainedEncoder", tmp_path / "repo")["encoder.layers.1"]
    before = torch.get_rng_state(), torch.nn.init.kaiming_uniform_, torch.get_default_dtype()
    for way in ("structure", "init"):
        entry.rebuild(strategy=way)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (torch.nn.init.kaiming_uniform_, torch.get_default_dtype()) == before[1:]


def test_two_rebuilt_modules_and_their_inputs_share_no_memory(tmp_path: Path) -> None:
    entry = entries_of("OverlappingViews", tmp_path / "repo")["inner"]
    first, second = entry.rebuild(), entry.rebuild()
    with torch.no_grad():
        first.layer.weight.zero_()
    assert second.layer.weight.any()
    (window, whole, twice), _ = entry.inputs()
    window.zero_()
    assert not whole[:, 1:3].any()
    assert twice[0] is twice[1]
    assert twice[0].stride() == (0,)
    assert entry.inputs()[0][0].any()
    assert check(Subject(entry._replay()))


def test_an_ancestor_is_a_stand_in_that_names_itself(tmp_path: Path) -> None:
    entries = entries_of("ParentWeight", tmp_path / "repo")
    assert entries[""].check()
    child = entries["child"].rebuild()
    assert not isinstance(child.parent, nn.Module)
    with pytest.raises(NotRebuildable, match=r"needs \.scale of its ancestor \(root\)") as caught:
        child(rows())
    assert caught.value.reason == "ancestor"
    assert "check the entry of the root instead" in caught.value.hint
    assert entries_of("ParentReference", tmp_path / "other")["child"].check()


def test_modules_are_made_on_the_cpu_unless_another_device_is_named(tmp_path: Path) -> None:
    entry = entries_of("TiedWeights", tmp_path / "repo")[""]
    assert {str(p.device) for p in entry.rebuild().parameters()} == {"cpu"}
    moved = entry.rebuild(device="meta")
    assert {str(p.device) for p in moved.parameters()} == {"meta"}
    assert moved.head.weight is moved.embed.weight


def test_each_call_has_the_state_it_began_with(tmp_path: Path) -> None:
    entry = entries_of("PythonCounter", tmp_path / "repo")["inner"]
    assert [entry.rebuild(call=i).calls for i in range(3)] == [0, 1, 2]
    assert [entry.rebuild(call=i).seen for i in range(3)] == [[], [1.0], [1.0, 2.0]]
    with pytest.raises(NotFound, match=r"3 call\(s\); there is no call 3"):
        entry.rebuild(call=3)


def test_another_process_rebuilds_the_same(tmp_path: Path, elsewhere: Callable[..., Any]) -> None:
    repo = tmp_path / "repo"
    entry = entries_of("CallsAnotherMethod", repo)[""]
    there = elsewhere("rebuild", repo=str(repo), ref=entry.id)
    assert there["cls"] == "tests.capture.zoo:CallsAnotherMethod"
    assert there["output"] == entry.outputs().tolist()
    assert there["devices"] == ["cpu"]
    assert elsewhere("check", repo=str(repo), ref=entry.id, backward=True)["status"] == "EXACT"


@pytest.mark.parametrize("path", ["os:system", "subprocess:Popen", "builtins:eval", "posix:system"])
def test_a_record_cannot_allow_itself_the_standard_library(path: str, tmp_path: Path) -> None:
    live = entries_of("LambdaAttribute", tmp_path / "repo")[""]._replay()
    wanted = (*live.metadata.packages, path.partition(":")[0])
    metadata = msgspec.structs.replace(live.metadata, packages=wanted)
    payload = Payload(metadata, live.payload.blob, live.payload.storage)
    with pytest.raises(NotRebuildable, match="outside the packages allowed") as caught:
        Replay(payload).importer.get(path)
    assert caught.value.reason == "untrusted_class"


def test_functions_of_another_package_of_the_users_come_along(tmp_path: Path) -> None:
    entry = entries_of("HookedByFunction", tmp_path / "repo")[""]
    assert entry.cls.startswith("torch.")
    assert "tests" in entry.metadata.packages
    assert "tests" in entry.metadata.roots
