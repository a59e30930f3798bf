"""Several processes at once, and processes that die: nothing is lost, nothing is half there."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.store.samples import Child, add, metadata, put_entry, run

from modulelens.errors import Conflict, DiskFull
from modulelens.store import LocalStore
from modulelens.store.index import Index
from modulelens.store.layout import open_layout


def add_many(root, name, count, send):
    store = LocalStore(root)
    for number in range(count):
        send(add(store, fqn="shared", blobs=(b"common" * 50, os.urandom(3000))).id)
        add(store, fqn=f"own.{name}.{number}")


def add_until_killed(root, send):
    store = LocalStore(root)
    for number in range(100_000):
        store.put_blobs([os.urandom(2000)])
        blob = os.urandom(300_000)
        send(add(store, fqn=f"m.{number % 7}", blobs=(blob,), aliases=("last",)).id)


def test_four_processes_lose_none(tmp_path):
    root = tmp_path / "repo"
    children = [Child(lambda send, name=name: add_many(root, name, 25, send)) for name in range(4)]
    printed = []
    for child in children:
        status, lines = child.wait()
        assert status == 0
        printed += lines
    assert len(set(printed)) == 100
    store = LocalStore(root)
    assert store.count() == 200
    assert store.versions(printed[0].split("/")[0]) == list(range(100, 0, -1))
    assert {row.id for row in store.find({"fqn": "shared"})} == set(printed)
    assert store.fsck().ok
    assert store.gc().removed_blobs == 0


def test_kill_9_at_any_point(tmp_path):
    root = tmp_path / "repo"
    store = LocalStore(root)
    kept = [add(store, fqn="before").id]
    store.close()
    rng = random.Random(5)
    for _ in range(15):
        child = Child(lambda send: add_until_killed(root, send))
        kept.append(child.line())
        time.sleep(rng.random() * 0.05)
        child.kill()
        status, lines = child.wait()
        assert status == -9
        kept += [line for line in lines if len(line) > 33]
        assert set(kept) <= {row.id for row in store.find()}
        for row in store.find():
            assert store.metadata(row.id).name == row.name
    assert store.fsck().problems == ()
    fresh = LocalStore(root)
    assert fresh.gc().unreadable == ()
    assert not any((root / "tmp").iterdir())
    assert not any((root / "changes").iterdir())
    for folder in (root / "entries").glob("*/*/"):
        assert {path.name for path in folder.iterdir()} == {"metadata.json", "state.pt"}
    assert fresh.fsck().ok
    assert set(kept) <= {row.id for row in fresh.find()}
    assert fresh.gc().removed_blobs == 0


def test_a_writer_that_died_before_indexing_is_noticed(tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "repo")
    first = add(store)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "refresh", lambda *_: os.kill(os.getpid(), 9))
        child = Child(lambda _: add(LocalStore(store.root), tags=("late",)))
        assert child.wait()[0] == -9
    assert len(list((store.root / "changes").iterdir())) == 1
    assert store.count({"tags": "late"}) == 1
    assert not any((store.root / "changes").iterdir())
    assert store.resolve(first.name) == f"{first.collection}/2"


def test_gc_leaves_the_blobs_of_an_add_in_another_process(tmp_path):
    root = tmp_path / "repo"

    def work(send):
        store = LocalStore(root)
        store.put_blobs([b"precious" * 100])
        send("put")
        time.sleep(0.7)
        send(add(store, blobs=(b"precious" * 100,)).id)
        time.sleep(0.5)
        store.put_blobs([b"orphan" * 100])
        send("orphan")
        time.sleep(60)

    child = Child(work)
    assert child.line() == "put"
    store = LocalStore(root)
    with pytest.raises(Conflict, match="held"):
        store.gc(timeout_s=0.2)
    assert store.gc(timeout_s=30).removed_blobs == 0
    entry_id = child.line()
    assert child.line() == "orphan"
    child.kill()
    child.wait()
    assert store.gc(timeout_s=5).removed_blobs == 1
    assert store.fsck().ok
    assert store.state(entry_id).keys() == {"scale"}


def test_gc_of_this_store_gives_up_failed_adds_but_not_those_in_an_adding_block(tmp_path):
    store = LocalStore(tmp_path / "repo")
    (digest,) = store.put_blobs([b"failed"])
    assert store.gc(timeout_s=0).removed_blobs == 1
    with pytest.raises(Conflict, match="add again"):
        put_entry(store, metadata(blobs={digest: 6}), {})
    with store.adding():
        (digest,) = store.put_blobs([b"running"])
        with pytest.raises(Conflict):
            store.gc(timeout_s=0.05)
        put_entry(store, metadata(blobs={digest: 7}), {})
    assert store.gc(timeout_s=0).removed_blobs == 0


def test_processes_that_change_one_entry_keep_each_others_changes(tmp_path):
    store = LocalStore(tmp_path / "repo")
    entry = add(store)
    store.close()

    def work(name):
        other = LocalStore(store.root)
        for number in range(20):
            tag = f"{name}-{number}"
            other.update(
                entry.id, lambda old, tag=tag: msgspec.structs.replace(old, tags=(*old.tags, tag))
            )
            other.alias(entry.id, tag)

    children = [Child(lambda _, name=name: work(name)) for name in "ab"]
    assert [child.wait() for child in children] == [(0, []), (0, [])]
    expected = {f"{name}-{number}" for name in "ab" for number in range(20)}
    assert set(store.metadata(entry.id).tags) == expected
    (row,) = store.find()
    assert set(row.tags) == set(row.aliases) == expected


def test_a_forked_child_can_use_the_store(tmp_path):
    store = LocalStore(tmp_path / "repo")
    add(store)
    store.put_blobs([b"of the parent"])

    def work(send):
        add(store, fqn="child")
        send(store.count())

    assert Child(work).wait() == (0, ["2"])
    assert store.count() == 2
    with pytest.raises(Conflict):
        LocalStore(tmp_path / "repo").gc(timeout_s=0)


def test_a_forked_child_verifies_bytes_after_its_parent_did(tmp_path):
    store = LocalStore(tmp_path / "repo")
    (digest,) = store.put_blobs([bytes(range(256)) * 65536])
    store.blob_path(digest)  # starts the hash's threads, which a fork does not copy

    def work(send):
        send(LocalStore(tmp_path / "repo").blob_path(digest).name == digest)

    assert Child(work).wait() == (0, ["True"])


def test_a_lost_index_is_rebuilt_by_several_processes_while_one_adds(tmp_path):
    root = tmp_path / "repo"
    store = LocalStore(root)
    for number in range(30):
        add(store, fqn=str(number))
    store.close()

    def work(send):
        other = LocalStore(root)
        for _ in range(15):
            send(other.count({"model": "dlrm"}) >= 30)
            (root / "index.sqlite").unlink(missing_ok=True)

    adder = Child(lambda send: add_many(root, "x", 30, send))
    others = [Child(work) for _ in range(2)]
    assert [child.wait() for child in others] == [(0, ["True"] * 15)] * 2
    assert adder.wait()[0] == 0
    assert store.count() == 90
    assert store.fsck().ok


def test_a_batch_that_fails_keeps_what_came_before(tmp_path):
    store = LocalStore(tmp_path / "repo")
    put_entry(store, metadata(fqn="a"), {})
    new = [(metadata(fqn="a"), {}), (metadata(fqn="b"), {}), (metadata(blobs={"a" * 64: 1}), {})]
    with pytest.raises(Conflict, match="not there"):
        store.put_entries(new, aliases=("base",))
    assert [(row.fqn, row.version) for row in store.find({"aliases": "base"})] == [
        ("a", 2),
        ("b", 1),
    ]
    assert store.count() == 3
    assert not any((store.root / "changes").iterdir())
    assert store.fsck().ok


def test_a_batch_that_is_killed_keeps_what_came_before(tmp_path):
    store = LocalStore(tmp_path / "repo")
    new = [(metadata(fqn=str(number)), {}) for number in range(9)]

    def die(stored):
        if stored.fqn == "4":
            os.kill(os.getpid(), 9)

    child = Child(lambda _: LocalStore(store.root).put_entries(new, progress=die))
    assert child.wait()[0] == -9
    assert [row.fqn for row in store.find()] == ["0", "1", "2", "3", "4"]
    assert [record.version for record in store.put_entries(new)] == [2] * 5 + [1] * 4
    assert store.fsck().ok


def test_blobs_written_in_the_background_are_there_before_their_entry(tmp_path):
    store = LocalStore(tmp_path / "repo")
    data = [os.urandom(400_000) for _ in range(9)]
    with store.adding():
        digests = store.put_blobs([*data, b"small"], wait=False)
        sizes = dict.fromkeys(digests[:-1], 400_000)
        put_entry(store, metadata(blobs=sizes), {})
    assert [store.blob_bytes(digest) for digest in digests] == [*data, b"small"]
    assert store.fsck().ok

    def overflow(send):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        other = LocalStore(store.root)
        with pytest.raises(DiskFull, match="10 blobs"), other.adding():
            blobs = other.put_blobs([os.urandom(400_000) for _ in range(10)], wait=False)
            put_entry(other, metadata(blobs=dict.fromkeys(blobs, 400_000)), {})
        send(other.count())

    assert run(overflow) == ["1"]
    assert store.gc().removed_blobs == 1


def test_those_who_open_a_new_repo_at_once_can_all_write(tmp_path: Path) -> None:
    """As the ranks of a job do: one of them makes it while the others look."""
    count = 8
    start = threading.Barrier(count)

    def opened(root: Path) -> bool:
        start.wait()
        layout = open_layout(root)
        return layout.writable and layout.tmp.is_dir()

    with ThreadPoolExecutor(count) as pool:
        for number in range(150):
            found = pool.map(opened, [tmp_path / f"{number}"] * count)
            assert all(found)
