"""Ranking models over two ranks of a real job: what each rank stored, and the whole of it.

One job traces every kind; this process never joins it.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.launch import launch

import modulelens as ml
from modulelens.errors import NotFound

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing it warns of its own dependencies
    pytest.importorskip("fbgemm_gpu", reason="torchrec needs fbgemm-gpu-cpu")
    pytest.importorskip("torchrec", reason="needs torchrec")

KINDS = [
    "table_wise",
    "swapped",
    "row_wise",
    "column_wise",
    "data_parallel",
    "table_row_wise",
    "grid",
    "mixed",
    "mean",
    "weighted",
    "large",
    "one_sided",
    "all_rows",
    "steps",
    "shapes",
    "pipelined_table_wise",
    "pipelined_row_wise",
    "hands_on",
    "waits_twice",
    "unused",
    "alone",
    "sequences_table_wise",
    "sequences_row_wise",
    "sequences_column_wise",
]
#: What is trained without a trace as well; "alone" has one on one rank.
UNDISTURBED = {
    *("column_wise", "large", "alone", "hands_on", "pipelined_table_wise", "sequences_row_wise")
}
#: Where several ranks' rows add up to one sum, its last bits depend on their order.
SUMMED = {"row_wise", "pipelined_row_wise", "table_row_wise", "grid", "mean", "large", "all_rows"}
#: Every rank has all of the tables.
WHOLE = {"data_parallel", "waits_twice"}
SPARSE = {"hands_on": "sparse.ebc"}
SPARSE |= {kind: "ec" for kind in KINDS if kind.startswith("sequences_")}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Job:
    """What a job stored, and what became of each module by rank."""

    def __init__(self, repo: ml.Repo, told: list[str]) -> None:
        self.repo = repo
        self.told = told

    def entries(self, name: str, *, merged: bool = False) -> list[ml.Entry]:
        """The versions of a module that lie in parts, or the one that was put together."""
        found = self.repo.versions(name)
        return [entry for entry in found if bool(entry.metadata.merged) is merged]

    def lookups(self, kind: str) -> list[ml.Entry]:
        """What each rank looked up of its own, by rank."""
        found = [e for e in self.repo.find({"model": kind}) if "._lookups." in f".{e.fqn}"]
        return sorted(found, key=lambda e: (e.fqn, e.metadata.environment.rank))

    def whole(self, name: str) -> ml.Entry:
        """The one that was put together."""
        (found,) = self.entries(name, merged=True)
        return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("job") / "repo"
    launch(2, "-m", "tests.distributed.train_ranking", path, *KINDS)
    repo = ml.Repo(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some entries cannot be rebuilt, as the tests say
        repo.verify(list(repo))
    told = [Path(f"{path}.{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    return Job(repo, told)


def sparse(kind: str) -> str:
    return f"{kind}/{SPARSE.get(kind, 'ebc')}"


def assert_faithful(entry: ml.Entry, kind: str) -> None:
    assert entry.grade is not None
    if kind in SUMMED and entry.grade == "close":
        assert "in another order" in entry.grade.reason
        assert entry.grade.max_abs is not None
        assert entry.grade.max_abs < 1e-6
    else:
        assert entry.grade == "exact", entry.grade.reasons


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*WHOLE, "unused", "alone", "shapes"}))
def test_all_ranks_make_the_whole_collection_and_all_above_it(job: Job, kind: str) -> None:
    collection, model = job.whole(sparse(kind)), job.whole(kind)
    assert collection.cls.startswith("torchrec.modules.embedding_modules:Embedding")
    assert collection.metadata.merged == (0, 1)
    assert collection.metadata.wrapped_fqn.startswith("_dmp_wrapped_module.module.")
    assert "inside DistributedModelParallel" in collection.metadata.warnings
    assert_faithful(collection, kind)
    assert_faithful(model, kind)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*WHOLE, "shapes"}))
def test_a_rank_alone_has_its_own_lookups(job: Job, kind: str) -> None:
    found = job.lookups(kind)
    assert {entry.metadata.environment.rank for entry in found} == (
        {0} if kind == "alone" else {0, 1}
    )
    for entry in found:
        assert entry.grade == "exact", (entry.fqn, entry.grade and entry.grade.reasons)


@pytest.mark.parametrize("kind", sorted({*KINDS} - WHOLE))
def test_a_part_says_that_it_is_one(job: Job, kind: str) -> None:
    for entry in job.entries(sparse(kind)):
        assert entry.grade == "no"
        assert entry.grade is not None
        assert entry.grade.reason.startswith("sharded: ")
        assert "merge" in entry.grade.reason


@pytest.mark.parametrize("name", ["data_parallel/ebc", "data_parallel", "waits_twice/ebc"])
def test_what_every_rank_has_whole_needs_no_other(job: Job, name: str) -> None:
    assert [entry.grade for entry in job.entries(name)] == ["exact", "exact"]
    assert not job.entries(name, merged=True)


@pytest.mark.parametrize("kind", ["table_wise", "weighted", "large", "sequences_row_wise"])
@pytest.mark.parametrize("strategy", ["init", "structure"])
def test_both_ways_of_rebuilding_work(job: Job, kind: str, strategy: Any) -> None:
    entry = job.whole(sparse(kind))
    module = entry._replay().module(strategy=strategy)
    args, kwargs = entry.inputs()
    found, expected = module(*args, **kwargs), entry.outputs()
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = ([v.values() for v in x.values()] for x in (found, expected))
    else:
        assert found.keys() == expected.keys()
        found, expected = [found.values()], [expected.values()]
    assert torch.allclose(torch.cat(found), torch.cat(expected), rtol=0, atol=1e-6)


def test_of_large_tables_the_rows_of_all_ranks_are_kept(job: Job) -> None:
    whole = job.whole("large/ebc")
    parts = job.entries("large/ebc")
    rows = whole.metadata.table_rows
    assert set(rows) == {"embedding_bags.t1.weight", "embedding_bags.t2.weight"}
    for name, (kept, total) in rows.items():
        assert total == 40_000
        assert 0 < kept <= sum(part.metadata.table_rows[name][0] for part in parts)
        touched = int((whole.rebuild().get_parameter(name) != 0).any(1).sum())
        assert touched == kept
    assert sum(whole.metadata.blobs.values()) < 100_000


def test_all_rows_of_all_ranks_are_kept_where_asked_for(job: Job) -> None:
    whole = job.whole("all_rows/ebc")
    assert not whole.metadata.table_rows
    for table in whole.rebuild().parameters():
        assert table.shape == (40_000, 16)
        assert bool((table != 0).any(1).all())


def test_of_one_rank_all_rows_of_its_part_are_kept_where_asked_for(job: Job) -> None:
    parts = [dict(entry.rebuild().named_parameters()) for entry in job.lookups("all_rows")]
    rows, columns = parts[:2], parts[2:]
    whole = job.whole("all_rows/ebc").rebuild()
    for dim, table, held in ((0, "t1", rows), (1, "t2", columns)):
        name = f"embedding_bags.{table}.weight"
        assert len(held) == 2
        assert all(bool((part[name] != 0).any(1).all()) for part in held)
        assert torch.cat([part[name] for part in held], dim).equal(whole.get_parameter(name))


def test_a_rank_of_whose_rows_none_is_looked_up_adds_none(job: Job) -> None:
    rows = [part.metadata.table_rows for part in job.entries("one_sided/ebc")]
    assert {found["embedding_bags.t1.weight"][0] == 0 for found in rows} == {True, False}


def test_values_that_changed_in_backward_are_those_before(job: Job) -> None:
    calls = job.whole("steps/ebc")
    assert len(calls.metadata.calls) == 2
    assert calls.metadata.calls[0].node != calls.metadata.calls[1].node


@pytest.mark.parametrize("rank", [0, 1])
def test_the_training_goes_as_without_the_trace(job: Job, rank: int) -> None:
    found = [line for line in job.told[rank].splitlines() if "as without the trace" in line]
    assert len(found) == 6
    assert all(line.endswith(": True") for line in found)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_step_has_as_many_collectives_as_without_the_trace(job: Job, rank: int) -> None:
    told = [line.partition("/") for line in job.told[rank].splitlines() if "/collectives" in line]
    assert [kind for kind, _, text in told if text == "collectives as without it: True"] == [
        kind for kind in KINDS if kind in UNDISTURBED
    ]
    counts = [json.loads(text.partition(": ")[2]) for _, _, text in told if "each step" in text]
    assert len(counts) == len(UNDISTURBED)
    assert all(number > 0 for steps in counts for number in steps)  # not counted where none is


def test_outputs_follow_the_plan(job: Job) -> None:
    assert job.whole("table_wise/ebc").outputs().keys() == ["f1", "f3", "f2"]
    assert job.whole("swapped/ebc").outputs().keys() == ["f2", "f1", "f3"]


def test_a_lazy_value_is_recorded_wherever_it_passes(job: Job) -> None:
    pooled = job.whole("hands_on/sparse").outputs()
    for entry in job.entries("hands_on/over"):
        assert entry.grade == "exact"
    (given,), _ = next(
        e for e in job.entries("hands_on/over") if e.metadata.environment.rank == 0
    ).inputs()
    assert torch.equal(given.values(), pooled.values())


def test_an_output_that_nobody_waits_for_is_said_to_be_missing(job: Job) -> None:
    whole = job.whole("unused/ebc")
    assert whole.grade == "no"
    assert whole.grade is not None
    assert whole.grade.reason.startswith("opaque_output: ")
    assert "did not wait for it" in whole.metadata.calls[0].notes[0]
    assert job.whole("unused").grade == "exact"


def test_one_rank_traces_while_the_other_goes_on(job: Job) -> None:
    assert not job.entries("alone/ebc", merged=True)
    with pytest.raises(NotFound, match=r"there is none of \[1\]"):
        job.repo.merge("alone/ebc")
    own = [line for line in job.told[1].splitlines() if line.startswith("alone/")]
    assert len(own) == 3  # how it trained; not what became of modules
    assert all("as without" in line or "each step" in line for line in own)


def test_only_shapes_are_put_together_as_well(job: Job) -> None:
    whole = job.whole("shapes/ebc")
    assert whole.grade == "shape"
    assert whole.rebuild().get_parameter("embedding_bags.t1.weight").shape == (50, 16)
    assert job.whole("shapes").grade == "shape"


def test_of_shapes_alone_tables_are_synthesised_and_looked_up(job: Job) -> None:
    entries = [job.whole("shapes/ebc"), *job.lookups("shapes")]
    assert len(entries) == 4  # t1 is one rank's, t2 lies on both
    for entry in entries:
        assert entry.grade == "shape"
        assert entry.grade is not None
        assert "weights were synthesised" in entry.grade.reason
        tables, again = ([*entry.rebuild().parameters()] for _ in range(2))
        assert all(map(torch.equal, tables, again))
        assert all(bool(table.isfinite().all()) and bool(table.any()) for table in tables)
        found, expected = entry.run().values(), entry.outputs().values()
        assert found.shape == expected.shape
        assert found.any()
        assert not found.equal(expected)


def test_what_is_not_called_says_why(job: Job) -> None:
    told = job.told[0].splitlines()
    assert "table_wise/ebc: recorded" in told
    assert "table_wise/ebc._lookups.0: recorded" in told
    why = "not called: its table is looked up by the sharded collection, as a whole"
    assert f"table_wise/ebc.embedding_bags.t1: {why}" in told
    assert not [line for line in told if "refused" in line or "not registered" in line]


def test_nothing_of_a_process_group_is_in_a_record(job: Job) -> None:
    for entry in job.repo.find({"model": "table_wise"}):
        assert "torchrec.distributed" not in str(entry._replay().payload.nodes(entry.metadata.node))
