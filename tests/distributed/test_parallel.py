"""One module out of a model that several ranks train: rebuilt here, without a process group."""

from __future__ import annotations

import copy
import json
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.distributed.launch import launch
from tests.distributed.models import Attention, Block, Decoder

import modulelens as ml
from modulelens.merge import merge
from modulelens.replay import Replay
from modulelens.stored import payload_of
from modulelens.tree.shards import parts_in

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not torch.distributed.is_available() or sys.platform != "linux", reason="gloo on Linux"
    ),
]
JOB = Path(__file__).parent / "job.py"
LARGE = ("ddp", "fsdp", "fsdp_kept", "fsdp_mixed", "fsdp_again", "tp", "compiled")
SMALL = ("ddp_micro", "fsdp_micro", "flat", "flat_micro")
PAIRS = LARGE + SMALL
WHOLE = [way for way in PAIRS if way != "tp"]
MODULES = 2 + 2 * 12 + 1  # the model, its table and head, 12 called modules of each layer
WRAPPED = {  # where the MLP of the first layer is for the trainer
    "ddp": "module.layers.0.mlp",
    "ddp_micro": "_orig_mod.module.layers.0.mlp",
    "fsdp_micro": "_orig_mod.layers.0._checkpoint_wrapped_module.mlp",
    "flat": "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.mlp",
    "flat_micro": "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module"
    "._checkpoint_wrapped_module.mlp",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    launch(2, JOB, folder, *PAIRS, "flat_unused")
    return folder


@pytest.fixture(scope="module")
def fours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fours")
    launch(4, JOB, folder, "grid")
    return folder


def graded(repo: ml.Repo, which: dict[str, Any] | None = None) -> list[ml.Entry]:
    entries = repo.find(which)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that parts alone cannot be rebuilt is looked at below
        repo.verify(entries)
    assert not torch.distributed.is_initialized()
    return [repo[entry.id] for entry in entries]


@pytest.mark.parametrize("way", PAIRS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_traced_rank_trains_the_same_bits_with_as_many_collectives(pairs, way, rank):
    found = json.loads((pairs / f"{way}.{rank}.json").read_text())
    assert found["traced"] == found["plain"]


@pytest.mark.parametrize("way", WHOLE)
def test_every_module_of_every_rank_is_rebuilt_whole_and_exact(pairs, way):
    entries = graded(ml.Repo(pairs / way))
    assert {e.grade.level.value for e in entries} == {"exact"}
    count, calls = MODULES - 12 * (way in SMALL), 1 + way.endswith("micro")
    assert Counter(e.metadata.environment.rank for e in entries) == {0: count, 1: count}
    once = [e for e in entries if e.cls.rpartition(":")[2] != "Dropout"]
    assert {len(e.metadata.calls) for e in once} == {calls}
    assert {str(e.grade.param_grads) for e in entries} <= {"exact", "None"}
    assert {str(e.grade.buffers) for e in entries} <= {"exact", "None"}
    again = {e.fqn for e in entries if e.metadata.recomputes}
    inside = {e.fqn for e in entries if e.fqn.startswith("layers.")}
    assert again == (inside if way in ("fsdp_again", "fsdp_micro", "flat_micro") else set())
    mlp = next(e for e in entries if e.fqn == "layers.0.mlp")
    assert mlp.metadata.wrapped_fqn == WRAPPED.get(way, mlp.metadata.wrapped_fqn)
    assert {e.metadata.environment.world_size for e in entries} == {2}
    assert len({e.metadata.environment.job for e in entries}) == 1
    root = next(e for e in entries if not e.fqn)
    assert root.cls == "tests.distributed.models:Decoder"
    assert root.grade.param_grads == "exact"
    made = root.rebuild()
    assert type(made) is Decoder
    assert type(made.layers[0]) is Block
    size = sum(p.numel() for p in Decoder(layers=1 if way in SMALL else 2).parameters())
    assert sum(p.numel() for p in made.parameters()) == root.metadata.params == size


def test_flat_weights_that_no_call_gathered_are_named(pairs):
    repo = ml.Repo(pairs / "flat_unused")
    entries = {e.fqn: e for e in graded(repo, {"fqn": {"$in": ["", "head", "layers.0.mlp.up"]}})}
    assert str(entries["head"].grade) == "exact"
    assert str(entries[""].grade) == "no"
    assert entries[""].grade.reason.startswith("sharded: unused")
    assert "fully_shard" in entries[""].grade.reason
    twice = entries["layers.0.mlp.up"]  # gathered anew for each of its calls
    assert len(twice.metadata.calls) == 2
    assert str(twice.grade.param_grads) == "exact"


def test_ranks_have_their_own_inputs_and_gradients(pairs):
    entries = {
        e.metadata.environment.rank: e for e in ml.Repo(pairs / "fsdp").find({"fqn": "head"})
    }
    (one, _), (two, _) = entries[0].inputs(), entries[1].inputs()
    assert not one[0].equal(two[0])
    grads = [entries[rank].grads()["parameters"]["weight"] for rank in (0, 1)]
    assert grads[0].shape == (50, 16)
    assert not grads[0].equal(grads[1])


def test_tensor_parallel_parts_are_exact_or_say_so_and_the_whole_is_close(pairs):
    entries = graded(ml.Repo(pairs / "tp"))
    parts = [e for e in entries if not e.metadata.merged]
    merged = {e.fqn: e for e in entries if e.metadata.merged}
    layers = ("q", "k", "v", "up", "out", "down")  # the last two row-wise, with a bias
    for entry in parts:
        if entry.fqn.rpartition(".")[2] in layers:
            assert entry.grade.level.value == "exact"
            assert str(entry.grade.param_grads) == "exact"
        elif entry.grade.level.value == "no":
            assert "sharded" in entry.grade.reason
            assert "merge" in entry.grade.reason
            assert entry.fqn in merged
    assert {e.metadata.merged for e in merged.values()} == {(0, 1)}
    assert {e.grade.level.value for e in merged.values()} == {"exact", "close"}
    part = next(e for e in parts if e.fqn == "layers.0.mlp.down")
    assert (part.rebuild().bias * 2).equal(merged[part.fqn].rebuild().bias)
    attention = merged["layers.0.attention"]
    assert attention.rebuild().q.weight.shape == (16, 16)
    assert attention.grade.max_abs < 1e-6
    assert attention.check(Attention).status.passed
    with pytest.raises(ml.errors.UsageError, match="nothing to merge"):
        ml.Repo(pairs / "tp").merge("tp/head")


def test_parts_on_a_grid_are_merged_for_each_batch(fours):
    repo = ml.Repo(fours / "grid")
    for rank in range(4):
        found = json.loads((fours / f"grid.{rank}.json").read_text())
        assert found["traced"] == found["plain"]
    entries = graded(repo)
    merged = [e for e in entries if e.metadata.merged]
    assert {e.grade.level.value for e in merged} == {"exact", "close"}
    assert {e.metadata.merged for e in merged} == {(0, 1), (2, 3)}
    roots = [e for e in merged if not e.fqn]
    assert len(roots) == 2
    assert all(e.grade.max_abs < 1e-6 for e in roots)
    weights = [root.rebuild().layers[1].mlp.up.weight for root in roots]
    assert weights[0].shape == (32, 16)
    assert weights[0].equal(weights[1])


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape of terabytes": lambda b: b.update(shape=[1 << 40, 7, 16]),
    "negative shape": lambda b: b.update(shape=[-3, 7, 16]),
    "shape of another kind": lambda b: b.update(shape="large"),
    "strides of terabytes": lambda b: b.update(stride=[1 << 50, 16, 1]),
    "no strides": lambda b: b.update(stride=[]),
    "a larger mesh": lambda b: b.update(mesh=[1 << 30]),
    "an empty mesh": lambda b: b.update(mesh=[0]),
    "no ranks": lambda b: b.update(ranks=[]),
    "ranks of another kind": lambda b: b.update(ranks=["0", None]),
    "unknown placement": lambda b: b.update(placements=[{"kind": "Elsewhere"}]),
    "a dimension that is not there": lambda b: b.update(placements=[{"kind": "Shard", "dim": 9}]),
    "placements of another kind": lambda b: b.update(placements=[None]),
    "another sum": lambda b: b.update(placements=[{"kind": "Partial", "reduce_op": "max"}]),
    "no part": lambda b: b.pop("local"),
    "a part of another kind": lambda b: b.update(local={"$tensor": 3}),
    "nothing": lambda b: b.clear(),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_strangers_parts_end_in_a_named_error(pairs, attack):
    """A repo is shared: what a record says of a part is checked before memory is taken for it."""
    store = ml.Repo(pairs / "tp")._store
    found = ml.Repo(pairs / "tp").versions("tp/layers.0.mlp.down")
    parts = [e.metadata for e in found if not e.metadata.merged]
    assert merge(store, parts)[0].merged == (0, 1)
    forged = copy.deepcopy(parts)
    for part in forged:
        HOSTILE[attack](part.calls[0].output["$dtensor"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if attack == "strides of terabytes":  # their order is all that is taken of them
        assert merge(store, forged)[0].merged == (0, 1)
    else:
        with pytest.raises(ml.errors.ModuleLensError):
            merge(store, forged)
            list(parts_in(forged[0].calls[0].output))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("divided", ["all", [2], {"$tensor": 3}])
def test_a_bias_divided_by_no_number_ends_in_a_named_error(pairs, divided):
    entry = next(
        e for e in ml.Repo(pairs / "tp").versions("tp/layers.0.mlp.down") if not e.metadata.merged
    )
    replay = Replay(payload_of(entry._store, entry.metadata))
    parameters = copy.deepcopy(replay.payload.node(entry.metadata.node).parameters)
    assert parameters["bias"]["$dtensor"]["divided"] == 2
    parameters["bias"]["$dtensor"]["divided"] = divided
    with pytest.raises(ml.errors.ModuleLensError):
        replay.value(parameters["bias"])


def test_what_was_measured_of_a_part_is_not_said_of_the_whole(pairs):
    store = ml.Repo(pairs / "tp")._store
    found = ml.Repo(pairs / "tp").versions("tp/layers.0.mlp.up")
    parts = [e.metadata for e in found if not e.metadata.merged]
    one = found[-1].benchmark(budget_s=0.05)
    measured = [msgspec.structs.replace(part, measurement=one) for part in parts]
    calls = (*parts[0].calls, *parts[0].calls)
    measured[0] = msgspec.structs.replace(measured[0], calls=calls)
    record, _ = merge(store, measured)
    assert record.measurement is None
    assert record.own_bytes == sum(record.blobs.values())
    assert any("only the first 1 are put together" in text for text in record.warnings)
