"""A team's repo through the public door: push, pull, open by URL, the one-liner of a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.remote.conftest import Between, at_s3
from torch import Tensor, nn

import modulelens as ml
from modulelens.errors import Conflict, Corrupted, NotFound, Unavailable, UsageError
from modulelens.store import LocalStore
from modulelens.store.remote import Draft, Version, open_remote
from modulelens.store.remote.cached import CachedStore
from modulelens.store.remote.folder import FolderRemote
from modulelens.store.remote.outbox import Outbox
from modulelens.store.remote.push import Pusher


class Wide(nn.Module):
    """Bytes enough that what was fetched can be told from records."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def traced(name: str = "wide", seed: int = 0) -> ml.Trace:
    torch.manual_seed(seed)
    with ml.trace(model := Wide(), name=name) as trace:
        model(torch.randn(8, 64)).sum().backward()
    return trace


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/team"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODULELENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repo(tmp_path: Path, url: str) -> ml.Repo:
    repo = ml.Repo(tmp_path / "repo")
    repo.add(traced(), verify=False, tags=["base.line"], aliases=["best"])
    assert repo.push(url).sent == 3
    return repo


def test_what_is_pulled_is_what_was_pushed(repo: ml.Repo, url: str, tmp_path: Path) -> None:
    other = ml.Repo(tmp_path / "other")
    came: list[int] = []
    (entry,) = other.pull(url, "wide/first@best", progress=came.append)
    assert entry.metadata == repo["wide/first"].metadata
    assert entry.metadata.tags == ("base.line",)
    assert other.aliases(entry) == {"best": 1}
    assert entry.check()
    assert sum(came) == sum(entry.metadata.blobs.values())  # only its own
    assert other.fsck().ok
    came.clear()
    assert [e.id for e in other.pull(url, "wide/first", progress=came.append)] == [entry.id]
    assert not came
    assert len(other) == 1
    rest = other.pull(url, None, {"fqn": {"$in": ["", "second"]}})
    assert {e.fqn for e in rest} == {"", "second"}
    assert all(e.check() for e in rest)


def test_a_number_here_is_not_the_one_there(repo: ml.Repo, url: str, tmp_path: Path) -> None:
    other = ml.Repo(tmp_path / "other")
    other.add(traced(seed=1), verify=False)
    (entry,) = other.pull(url, "wide/first@v1")
    assert entry.version == 2
    assert other.push(url).sent == 3  # the seed's own three: the pulled one is known there
    assert [v.version for v in ml.Repo(url).versions("wide/first")] == [2, 1]


def test_a_change_of_the_record_is_a_version_and_new_names_are_none(
    repo: ml.Repo, url: str
) -> None:
    repo.tag("wide/first", "hot")
    repo.alias("wide/first", "fast")
    done = repo.push(url)
    assert (done.sent, done.known, done.bytes) == (0, 3, 0)
    there = ml.Repo(url)
    assert set(there["wide/first@fast"].metadata.tags) == {"base.line", "hot"}
    repo["wide/first"].benchmark(budget_s=0.05)
    assert repo.push(url).sent == 1
    assert there["wide/first"].version == 2  # of one capture the last one
    assert there["wide/first"].metadata.measurement is not None


def test_a_url_is_a_repo(repo: ml.Repo, url: str, cache: Path) -> None:
    there = ml.Repo(url)
    assert len(there) == 3
    assert [e.fqn for e in there.find({"params": {"$gt": 0}})] == ["", "first", "second"]
    assert [r.name for r in there.rows(limit=1, offset=1)] == ["wide/first"]
    assert there.count({"tags": "base.line"}) == 3
    entry = there["wide/second@best"]
    blobs = cache.glob("*/blobs/*/*")
    assert not list(blobs)  # a record is read without its bytes
    assert entry.check()
    assert entry.check(candidate=nn.Linear)
    assert "wide/third" not in there
    with pytest.raises(NotFound, match="wide/frist") as error:
        there["wide/frist"]
    assert "wide/first" in error.value.did_you_mean
    with pytest.raises(UsageError, match="nothing is added"):
        there.add(traced())
    there.tag(entry, "seen")
    assert ml.Repo(url).count({"tags": "seen"}) == 1
    with pytest.raises(Conflict, match="best"):
        there.remove(entry)
    there.remove(entry, force=True)
    assert len(there) == 2
    assert "wide/second" not in there


def test_what_upkeep_means_for_a_url(repo: ml.Repo, url: str, tmp_path: Path) -> None:
    there = ml.Repo(url)
    came: list[int] = []
    report = there.fsck(progress=came.append)
    blobs = {d: n for e in repo for d, n in e.metadata.blobs.items()}
    assert (report.ok, report.entries, report.blobs) == (True, 3, len(blobs))
    assert sum(came) == sum(blobs.values())
    assert not list(there.root.glob("blobs/*/*"))  # nothing is kept
    refusing = [there.gc, there.reindex, lambda: there.verify(there.find())]
    for refused in [*refusing, lambda: there.merge("wide/first")]:
        with pytest.raises(UsageError) as caught:
            refused()
        assert caught.value.hint
    first = there["wide/first"].metadata
    (record,) = (tmp_path / "team/files" / first.collection).rglob("metadata.json")
    pack = max((tmp_path / "team/packs").rglob("*"), key=lambda p: p.is_file() * p.stat().st_size)
    for path in (record, pack):
        path.chmod(0o600)
        path.write_bytes(b"x" * path.stat().st_size)
    bad = {problem.subject: problem for problem in ml.Repo(url).fsck().problems}
    assert set(bad) == {first.id, pack.name}
    assert {problem.code for problem in bad.values()} == {"CORRUPTED"}
    assert bad[pack.name].entries


def test_a_bucket_is_a_repo(repo: ml.Repo, tmp_path: Path, cache: Path) -> None:
    with at_s3(tmp_path) as place:
        url = place.fresh()
        assert repo.push(url).sent == 3
        there = ml.Repo(url)
        entry = there["wide/first@best"]
        assert entry.check()
        there.tag(entry, "seen")
        there.alias(entry, "base")
        for again in (ml.Repo(url), ml.Repo(url)):
            assert again.count({"tags": "seen"}) == 1
            assert again["wide/first@base"].check()
        assert there.fsck().ok
        there.remove("wide/second", force=True)
        assert len(ml.Repo(url)) == 2
        assert repo.push(url).removed == 1
    assert len(list(cache.glob("seen-*.sqlite"))) == 1


def test_a_place_to_which_nothing_was_pushed_is_said_to_be_one(tmp_path: Path) -> None:
    there = ml.Repo(f"file://{tmp_path}/taem")
    assert there.find() == []
    with pytest.raises(NotFound) as caught:
        there["wide/first"]
    assert "there are no entries at" in caught.value.hint
    with pytest.raises(NotFound) as caught:
        ml.Repo(tmp_path / "repo").pull(there._store.remote.url, None, {"cls": "Linear"})
    assert "there are no entries at" in caught.value.hint


def test_what_is_pulled_side_by_side_is_in_order_and_whole(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = ml.Repo(tmp_path / "repo")
    for seed in range(4):
        repo.add(traced(seed=seed), verify=False, tags=[f"s{seed}"], aliases=[f"a{seed}"])
    repo.push(url)
    # A record of the third capture is damaged: what came before it stays, and is whole.
    bad = repo["wide/first@v3"].metadata
    files = tmp_path / "team/files" / bad.collection
    (record,) = (p for p in files.rglob("metadata.json") if bad.trace_id in p.read_text())
    data = record.read_bytes()
    record.chmod(0o600)
    record.write_bytes(data[:-1])
    other = ml.Repo(tmp_path / "other")
    with pytest.raises(Corrupted):
        other.pull(url, None, {"fqn": "first"})
    assert [e.metadata.tags for e in other.versions("wide/first")] == [("s1",), ("s0",)]
    assert other.aliases("wide/first") == {"a0": 1, "a1": 2}
    assert other.fsck().ok
    record.write_bytes(data)
    assert [e.version for e in other.pull(url, None, {"fqn": "first"})] == [1, 2, 3, 4]
    assert len(other.pull(url)) == 12
    assert [e.metadata.tags for e in other.versions("wide/second")] == [
        (f"s{seed}",) for seed in (3, 2, 1, 0)
    ]
    assert other.fsck().ok
    assert all(entry.check() for entry in other.find({"version": 3}))


def test_what_was_pulled_is_not_put_back(repo: ml.Repo, url: str, tmp_path: Path) -> None:
    other, there = ml.Repo(tmp_path / "other"), ml.Repo(url)
    other.pull(url)
    assert other.aliases("wide/first") == {"best": 1}
    repo.add(traced(seed=1), verify=False)
    repo.push(url)
    there.alias("wide/first@v2", "best")
    there.remove("wide/second", force=True)
    there.remove("wide/second@best", force=True)
    done = other.push(url)
    assert (done.sent, done.known, done.removed) == (0, 2, 1)
    assert there.aliases("wide/first") == {"best": 2}
    # A pull takes what others moved, and a later push does not give it back either.
    other.pull(url, "wide/first@v1")
    other.pull(url, "wide/first@v2")
    there.alias("wide/first@v1", "best")
    assert other.push(url).known == 3
    assert there.aliases("wide/first") == {"best": 1}
    other.alias("wide/first@v2", "mine")
    other.push(url)
    assert there.aliases("wide/first") == {"best": 1, "mine": 2}


def test_candidates_of_files_run_on_what_a_url_holds(
    repo: ml.Repo, url: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\nclass Mine(nn.Linear): pass\n")
    entry = ml.Repo(url)["wide/first"]
    assert entry.check(f"{tmp_path}/mine.py:Mine")


def test_the_cache_stays_within_its_bound(repo: ml.Repo, url: str, tmp_path: Path) -> None:
    own = sum(repo["wide/first"].metadata.blobs.values())
    store = CachedStore(url, folder=tmp_path / "small", most_bytes=int(1.2 * own))
    for ref in ("wide/first", "wide/second", "wide/first"):
        store.complete(store.resolve(ref))
        there = [f.stat().st_size for f in (tmp_path / "small/blobs").rglob("*") if f.is_file()]
        assert own / 2 < sum(there) <= 1.2 * own
    assert [m.name for m in map(store.metadata, store._layout.entry_ids())] == ["wide/first"]


def test_what_was_used_is_there_without_the_remote(
    repo: ml.Repo, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ml.Repo(url)
    assert there["wide/first"].check()

    def away(*_: object, **__: object) -> None:
        raise Unavailable("no route")

    monkeypatch.setattr(FolderRemote, "get", away)
    with pytest.warns(UserWarning, match="no route"):
        assert there["wide/first"].check()


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_what_came_damaged_gets_nowhere(
    repo: ml.Repo, url: str, tmp_path: Path, damage: str
) -> None:
    packs = [p for p in (tmp_path / "team/packs").rglob("*") if p.is_file()]
    largest = max(packs, key=lambda pack: pack.stat().st_size)
    whole = largest.read_bytes()
    largest.chmod(0o600)
    bad = {"flip": whole[:-1] + bytes([whole[-1] ^ 1]), "cut": whole[:-1]}.get(damage)
    largest.unlink() if bad is None else largest.write_bytes(bad)
    other = ml.Repo(tmp_path / "other")
    with pytest.raises(NotFound if bad is None else Corrupted):
        other.pull(url)
    assert other.fsck().ok
    largest.write_bytes(whole)
    assert len(other.pull(url)) == 3
    assert other.fsck().ok


def test_a_trace_stores_and_sends_itself(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODULELENS_REPO", str(tmp_path / "mine"))
    torch.manual_seed(0)
    with ml.trace(model := Wide(), name="wide", push=url) as trace:
        model(torch.randn(8, 64)).sum().backward()
    assert trace.warnings == []
    assert len(ml.Repo()) == 3  # at once
    there = until(lambda: len(ml.Repo(url)) == 3 and ml.Repo(url))
    assert {str(e.grade) for e in there} == {"exact"}


def test_training_goes_on_where_a_push_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no repo")
    monkeypatch.setenv("MODULELENS_REPO", str(tmp_path / "file"))
    model = Wide()
    with pytest.warns(UserWarning, match="not pushed"), ml.trace(model, push="file:///x/y"):
        model(torch.randn(8, 64)).sum().backward()
    for push in ("somewhere", "wandb://a/b/c", "://x", 5):
        with pytest.raises(UsageError, match=r"URL|registry") as caught:
            ml.trace(model, push=push)
        assert "wandb://entity/registry" in caught.value.hint


def test_only_rank_0_pushes(repo: ml.Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert repo.push(f"file://{tmp_path}/unseen").sent == 0
    assert not (tmp_path / "unseen").exists()
    monkeypatch.setenv("RANK", "x")  # who would it be?
    with pytest.raises(UsageError, match="RANK='x' is no number"):
        repo.push(f"file://{tmp_path}/unseen")


def until(holds: Callable[[], object], timeout_s: float = 90.0) -> ml.Repo:
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert isinstance(found, ml.Repo)
    return found


def watching(url: str, repo: ml.Repo) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "modulelens", "push", url, "--watch", "--repo", str(repo.root)]
    return subprocess.Popen(words, env=os.environ, stdout=subprocess.PIPE, text=True)


def test_a_push_that_is_watching_sends_what_comes(url: str, tmp_path: Path) -> None:
    repo = ml.Repo(tmp_path / "repo")
    repo.add(traced("one"), verify=False)
    with watching(url, repo) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("3 entries sent")
            repo.add(traced("two", seed=1), verify=False)
            until(lambda: len(ml.Repo(url)) == 6 and ml.Repo(url))
        finally:
            process.terminate()
            process.wait(10)


def test_a_push_that_is_watching_leaves_the_turn_to_another_one(url: str, tmp_path: Path) -> None:
    entered, free = threading.Event(), threading.Event()

    class Slow(Between):
        def put(self, draft: Draft, **how: bool) -> Version:
            entered.set()
            free.wait(60)
            return self.remote.put(draft, **how)

    repo = ml.Repo(tmp_path / "repo")
    repo.add(traced("one"), verify=False)
    outbox = Outbox(repo.root / "outbox.sqlite")
    outbox.ask(url, [repo["one/first"].metadata])
    pusher = Pusher(LocalStore(repo.root), url, remote=Slow(open_remote(url)))
    with ThreadPoolExecutor(1) as pool, watching(url, repo) as process:
        try:
            other = pool.submit(pusher.drain)
            assert entered.wait(30)
            until(lambda: outbox.waiting(url) == 3 and repo)  # it has asked, and been told to wait
            time.sleep(0.5)
            assert process.poll() is None
            free.set()
            assert other.result().sent == 3
            assert process.stdout is not None
            assert process.stdout.readline().startswith("0 entries sent")
        finally:
            free.set()
            process.terminate()
            process.wait(10)
