"""The environment is read without importing torch, without git, and without a repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modulelens.environment import _git, read_environment
from modulelens.records import Environment, from_json, to_json


@pytest.fixture(autouse=True)
def forget():
    _git.cache_clear()
    yield
    _git.cache_clear()


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def test_it_says_what_runs_here():
    found = read_environment()
    assert found.torch == torch.__version__
    assert found.python.startswith("3.")
    assert found.cpu
    assert found.packages["msgspec"]
    assert found.packages["torch"]
    assert "os" not in found.packages
    assert found.command == tuple(sys.argv)
    assert from_json(to_json(found), Environment, what="test") == found


def test_commit_and_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_environment().git_commit == ""
    _git.cache_clear()
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = read_environment()
    assert clean.git_commit == git(tmp_path, "rev-parse", "HEAD")
    assert Path(clean.git_root).samefile(tmp_path)
    assert not clean.git_dirty
    _git.cache_clear()
    (tmp_path / "a.txt").write_text("2")
    assert read_environment().git_dirty


def test_a_repository_without_commits_and_a_machine_without_git(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    assert read_environment().git_commit == ""
    _git.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_environment().git_root == ""


def test_the_rank_comes_from_the_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = read_environment()
    assert (found.rank, found.world_size) == (3, 8)


@pytest.mark.parametrize("rank", ["x", "", "-1", "1.5"])
def test_a_rank_that_is_no_number_is_none(monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "many")
    found = read_environment()
    assert (found.rank, found.world_size) == (0, 1)


def test_the_rank_comes_from_the_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        found = read_environment()
        assert (found.rank, found.world_size) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_torch_is_not_imported():
    code = (
        "import sys; from modulelens.environment import read_environment as r; e = r(); "
        "print(e.torch, 'torch' in sys.modules)"
    )
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [torch.__version__, "False"]
