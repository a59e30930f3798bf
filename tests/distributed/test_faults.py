"""What goes wrong with tracing on one rank stays there: the job ends as it does untraced."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.distributed.launch import started

import modulelens as ml

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not torch.distributed.is_available() or sys.platform != "linux", reason="gloo on Linux"
    ),
]
JOB = Path(__file__).parent / "faulty.py"


def traced(
    repo: Path, *, fault: str = "", ranks: str = "all", modules: str = "*"
) -> tuple[str, int]:
    """What the job printed, and how it ended."""
    words = ["-m", "modulelens", "trace", "--ranks", ranks, "--modules", modules, "--no-verify"]
    done = started(2, *words, "--repo", repo, "--", JOB, FAULT=fault)
    return done.stdout, done.returncode


def ends(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d ends with [0-9.]+", output))


@pytest.fixture(scope="module")
def untraced() -> list[str]:
    done: subprocess.CompletedProcess[str] = started(2, JOB)
    assert done.returncode == 0
    assert len(ends(done.stdout)) == 2
    return ends(done.stdout)


@pytest.mark.parametrize("fault", ["tracer", "store"])
def test_a_tracer_that_fails_on_one_rank_stops_none(fault, untraced, tmp_path):
    output, code = traced(tmp_path / "repo", fault=fault)
    assert code == 0, output
    assert ends(output) == untraced
    assert "injected" in output
    assert "rank 0 stored nothing" in output
    entries = ml.Repo(tmp_path / "repo").find()
    assert {e.metadata.environment.rank for e in entries} == {1}
    assert all(e.check().status is ml.Status.EXACT for e in entries)


@pytest.mark.parametrize(("fault", "stored"), [("full", {1: 3}), ("fills", {0: 1, 1: 1})])
def test_a_full_disk_stops_no_rank_and_leaves_nothing_half(fault, stored, untraced, tmp_path):
    root = tmp_path / "repo"
    output, code = traced(root, fault=fault)
    assert (code, ends(output)) == (0, untraced)
    assert f"rank 0 could not store all: no space left on {root}: " in output
    assert "bytes needed" in output
    assert ("rank 1 could not store all" in output) is (fault == "fills")
    assert output.count("2 of 3 entries not stored: ") == 2 * (fault == "fills")
    repo = ml.Repo(root)
    assert repo.fsck().ok
    assert Counter(e.metadata.environment.rank for e in repo.find()) == stored
    assert all(e.check().status is ml.Status.EXACT for e in repo.find())
    assert [*root.glob("tmp/*")] == []
    entries = {path.relative_to(root / "entries").as_posix() for path in root.glob("entries/*/*")}
    assert entries == {e.id for e in repo.find()}
    repo.gc()
    blobs = {path.name for path in root.glob("blobs/*/*")}
    assert blobs == {digest for e in repo.find() for digest in e.metadata.blobs}


def test_a_pattern_that_matches_nothing_stops_no_rank(untraced, tmp_path):
    output, code = traced(tmp_path / "repo", modules="nothing", ranks="0")
    assert (code, ends(output)) == (0, untraced)
    assert "no module matches 'nothing'" in output


def test_only_the_ranks_that_are_asked_trace(untraced, tmp_path):
    output, code = traced(tmp_path / "repo", ranks="1")
    assert (code, ends(output)) == (0, untraced)
    entries = ml.Repo(tmp_path / "repo").find()
    assert {e.metadata.environment.rank for e in entries} == {1}


def test_a_rank_that_is_killed_leaves_what_the_other_wrote_readable(tmp_path):
    output, code = traced(tmp_path / "repo", fault="killed")
    assert code != 0
    assert ends(output) == []
    repo = ml.Repo(tmp_path / "repo")
    assert repo.fsck().ok
    assert all(e.check().status is ml.Status.EXACT for e in repo.find())
    (tmp_path / "repo" / "index.sqlite").unlink(missing_ok=True)
    assert repo.reindex() == len(repo.find())


@pytest.mark.parametrize("fault", ["script", "leaves"])
def test_a_script_that_fails_after_its_traced_step_fails_the_job(fault, tmp_path):
    output, code = traced(tmp_path / "repo", fault=fault, ranks="0")
    assert code != 0, output
    assert ends(output) == []
    entries = ml.Repo(tmp_path / "repo").find()
    assert {e.fqn for e in entries} == {"", "up", "down"}
    assert {e.metadata.environment.rank for e in entries} == {0}
    assert all("the script ended by" in " ".join(e.metadata.warnings) for e in entries)


def test_where_no_repo_can_be_the_script_still_ends_as_it_would(untraced, tmp_path):
    (tmp_path / "repo").write_text("no folder")
    output, code = traced(tmp_path / "repo")
    assert (code, ends(output)) == (0, untraced)
    assert "rank 0 stored nothing" in output
    output, code = traced(tmp_path / "repo", fault="script")
    assert code != 0
    assert "the script's own" in output


@pytest.mark.parametrize(
    "words",
    [("--keep", "half"), ("--ranks", "two"), ("--steps", "0"), ("-m",)],
    ids=["keep", "ranks", "steps", "script"],
)
def test_a_mistake_of_the_command_line_is_one(words, tmp_path):
    script = "no_such_script.py" if words == ("-m",) else JOB
    wish = () if words == ("-m",) else words
    command = ("-m", "modulelens", "trace", *wish, "--repo", tmp_path / "repo", "--", script)
    done = started(2, *command)
    assert done.returncode != 0
    assert ends(done.stdout) == []
