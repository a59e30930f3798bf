"""`push`, `pull` and `find --remote`: what they print, and what they say when it goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.shell import modulelens
from torch import nn

import modulelens as ml
from modulelens.cli.push import _reply
from modulelens.store.remote.push import Pushed


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MODULELENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MODULELENS_REMOTE", raising=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with ml.trace(model, name="net") as trace:
        model(torch.randn(2, 4)).sum().backward()
    repo = ml.Repo(tmp_path / "repo")
    repo.add(trace, verify=False)
    return str(repo.root)


def test_a_team_shares_what_one_of_them_pushed(
    repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/team"
    said = modulelens("push", url, "cls=Linear", "--repo", repo)
    assert said.code == 0
    assert said.out.startswith("1 entry sent")
    monkeypatch.setenv("MODULELENS_REMOTE", url)
    sent = modulelens("push", "--repo", repo, "--json").json
    assert (sent["data"]["sent"], sent["data"]["known"], sent["ok"]) == (2, 1, True)
    assert modulelens("push", "cls=Linear", "--repo", repo).out.startswith("0 entries sent")
    found = modulelens("find", "params>0", "--remote", url)
    assert "net/0@v1" in found.out
    assert "2 entries" in found.out
    mine = str(tmp_path / "mine")
    pulled = modulelens("pull", "net/0", "--repo", mine, "--json").json
    assert pulled["data"]["entries"] == ["net/0@v1"]
    assert pulled["next"] == [f"modulelens check net/0@v1 --repo {mine}"]
    assert "3 entries from" in modulelens("pull", "--where", "model=net", "--repo", mine).out
    assert modulelens("show", "net/1", "--repo", url).out.startswith("net/1@v1")
    other = modulelens("push", "--repo", repo, RANK="1", WORLD_SIZE="2")
    assert "only rank 0 pushes" in other.err
    status = modulelens("push", "--status", "--repo", repo)
    assert status.out.startswith("3 sent, 0 waiting, 0 failed")


def test_status_says_by_name_what_waits_and_why(repo: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    url = f"file://{tmp_path}/file/team"
    waits = modulelens("push", url, "--tries", "1", "--repo", repo)
    assert waits.code == 7
    assert "NotADirectory" in waits.out
    assert f"later: modulelens push {url} --queued --repo {repo}" in waits.out
    nothing = modulelens("push", f"file://{tmp_path}/other", "cls=X", "--repo", repo)
    assert "no entry of the repo fits" in nothing.err
    said = modulelens("push", url + "/", "--status", "--repo", repo)
    assert f"waiting: net/0@v1 to {url}: " in said.out
    assert "NotADirectory" in said.out
    bad = modulelens("push", "wandb://a/b/c", "--repo", repo)
    assert (bad.code, "wandb://entity/registry" in bad.err) == (2, True)
    assert "0 waiting" in modulelens("push", "wandb://a/b", "--status", "--repo", repo).out


def test_one_remote_has_one_name(repo: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/team"
    (tmp_path / "team").write_text("not mounted yet")
    assert modulelens("push", url, "--tries", "1", "--repo", repo).code == 7
    (tmp_path / "team").unlink()
    words = ["push", f"{url}/", "--queued", "--verify", "--repo", repo]
    assert modulelens(*words).out.startswith("3 entries sent")
    assert "3 entries" in modulelens("find", "grade=exact", "--remote", f"{url}//").out


def test_what_was_removed_there_is_said_and_can_be_sent_again(repo: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/team"
    modulelens("push", url, "--repo", repo)
    assert modulelens("remove", "net/0", "--repo", url).code == 0
    said = modulelens("push", url, "--repo", repo)
    assert said.code == 0
    assert "1 removed there since and not sent again (--again sends them)" in said.out
    assert modulelens("push", url, "--repo", repo, "--json").json["data"]["removed"] == 1
    assert modulelens("push", url, "net/0", "--again", "--watch", "--repo", repo).code == 2
    assert modulelens("push", url, "--again", "--repo", repo).out.startswith("3 entries sent")
    assert "net/0@v2" in modulelens("find", "cls=Linear", "--remote", url).out


def test_mistakes_say_what_to_do(repo: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/team"
    for words, code, text in [
        (["push", "--repo", repo], 2, "MODULELENS_REMOTE"),
        (["push", "nosuch://x", "--repo", repo], 2, "nosuch"),
        (["push", "http://127.0.0.1:9/x", "--repo", repo], 2, "nothing can be listed or written"),
        (["find", "--remote", "ftp://no.invalid/x"], 7, "ftp://no.invalid/x: cannot connect"),
        (["gc", "--repo", url], 2, "may be deleted at any time"),
        (["reindex", "--repo", url], 2, "fsck --repo"),
        (["push", url, "--watch", "--queued", "--repo", repo], 2, "one of them"),
        (["push", url, "cls=Linear", "--queued", "--repo", repo], 2, "terms"),
        (["pull", "--remote", url], 2, "which entries"),
        (["pull", "a", "--where", "cls=B", "--remote", url], 2, "which entries"),
        (["pull", "net", "--remote", url, "--repo", f"{tmp_path}/new"], 3, "no entry 'net'"),
        (["find", "cls=A", "--remote", url, "--repo", repo], 2, "one of them"),
    ]:
        said = modulelens(*words)
        assert said.code == code, (words, said)
        assert text in said.err, (words, said)


def test_an_address_that_may_be_mistyped_is_doubted(repo: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/taem"
    for words in (["find", "cls=Linear", "--remote", url], ["ls", "--repo", url]):
        said = modulelens(*words)
        assert (said.code, said.err.count(f"there are no entries at {url}")) == (0, 1)
    assert "there are no entries at" in modulelens("ls", MODULELENS_REPO=url).err
    modulelens("push", url, "--repo", repo)
    assert "no entries at" not in modulelens("find", "cls=None", "--remote", url).err
    assert "3 entries" in modulelens("fsck", "--repo", url).out


def test_what_waits_and_what_failed_is_an_exit_code() -> None:
    waits = _reply("s3://b/c", Pushed(sent=1, waiting=2), "r")
    assert waits.failure is not None
    assert waits.failure.exit_code == 7
    assert "push s3://b/c --queued --repo r" in waits.failure.hint
    failed = _reply("s3://b/c", Pushed(failed=("id: no such name",)), None)
    assert failed.failure is not None
    assert failed.failure.exit_code == 2
    assert "id: no such name" in failed.text
