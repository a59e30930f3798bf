"""What holds of every remote, whatever it is made of."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.remote.conftest import (
    Spot,
    contents,
    draft,
    numbered,
    pulled,
    push,
    records,
    there,
)
from tests.store.samples import metadata as record_with
from tests.store.samples import put_entry
from tests.store.test_query import FILTERS, ROWS
from torch import nn

import modulelens as ml
from modulelens.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    Unavailable,
    UsageError,
)
from modulelens.records import collection_id
from modulelens.store import LocalStore, matches
from modulelens.store.remote import Remote
from modulelens.store.remote.outbox import WAITING, Outbox
from modulelens.store.remote.pull import chosen, everything, fetch, pull
from modulelens.store.remote.push import record_of
from modulelens.store.remote.spool import spool

FIRST = collection_id("net", "first")
TEXTS = [
    "v2",
    "layer1.0",
    "two words",
    " ",
    "schön/größer",
    "a" * 1000,
    "'\"\\%_*?[x]",
    "\N{SNOWMAN}",
]


# ---- there and back


def test_a_round_trip_keeps_every_bit(spot: Spot, store: LocalStore, tmp_path: Path) -> None:
    url = spot.fresh()
    done = push(store, url)
    assert (done.sent, done.known, done.waiting, done.failed) == (6, 0, 0, ())
    back = pulled(spot.open(url), tmp_path / "back")
    assert contents(back) == contents(store)
    theirs, mine = ml.Repo(back.root), ml.Repo(store.root)
    assert theirs.fsck().ok
    for entry in mine.find():
        found = theirs[f"{entry.name}@v{entry.version}"]
        assert found.check().status is ml.Status.EXACT
        assert set(found.metadata.tags) == set(entry.metadata.tags)
        assert theirs.aliases(found) == mine.aliases(entry)


def test_pushing_again_sends_nothing(spot: Spot, store: LocalStore) -> None:
    url = spot.fresh()
    push(store, url)
    before = there(spot.open(url))
    done = push(store, url)
    assert (done.sent, done.known, done.bytes, done.waiting) == (0, 6, 0, 0)
    assert there(spot.open(url)) == before


def test_a_change_of_the_record_alone_is_a_version_and_sends_no_tensors(
    spot: Spot, store: LocalStore
) -> None:
    url = spot.fresh()
    push(store, url)
    entry = store.resolve("net/first@good")
    changed = store.update(entry, lambda m: msgspec.structs.replace(m, depth=77))
    done = push(store, url)
    assert (done.sent, done.known) == (1, 5)
    assert done.bytes == len(record_of(changed)) + store.state_path(changed).stat().st_size
    remote = spot.open(url)
    assert remote.get(FIRST).version == 3
    assert [v.version for v in there(remote, {"depth": 77})] == [3]
    assert fetch(remote, remote.get(FIRST)).metadata.depth == 77


def test_what_is_pulled_is_known_when_it_is_pushed_back(
    spot: Spot, store: LocalStore, tmp_path: Path
) -> None:
    url = spot.fresh()
    push(store, url)
    back = pulled(spot.open(url), tmp_path / "back")
    assert push(back, url).known == 6
    found = pull(back, spot.open(url), there(spot.open(url)))
    assert {record.id for record in found} == {record.id for record in records(back)}
    assert len(records(back)) == 6


def test_two_repos_number_one_module_together(
    spot: Spot, store: LocalStore, captured: Path, tmp_path: Path
) -> None:
    url = spot.fresh()
    other = LocalStore(tmp_path / "other")
    put_entry(other, record_with("net", "first"), {})
    assert push(store, url).sent == 6
    assert push(other, url).sent == 1
    found = there(spot.open(url), {"fqn": "first"})
    assert sorted(v.version for v in found) == [1, 2, 3]


def test_what_others_changed_there_stays(spot: Spot, store: LocalStore) -> None:
    url, first, good = spot.fresh(), *map(store.resolve, ("net/first@first", "net/first@good"))
    store.update(first, lambda m: msgspec.structs.replace(m, created="2020-01-01T00:00:00+00:00"))
    push(store, url)
    remote = spot.open(url)
    one, two = (remote.get(FIRST, number) for number in "12")
    assert (set(one.row.aliases), set(two.row.aliases)) == ({"first"}, {"good", "last"})
    remote.alias(one, add=["good"], remove=[])
    remote.tag(two, add=["theirs"], remove=two.row.tags[:1])
    store.alias(good, "best")
    assert push(store, url).known == 6
    found = {v.version: v.row for v in there(spot.open(url), {"fqn": "first"})}
    assert set(found[1].aliases) == {"first", "good"}
    assert set(found[2].aliases) == {"last", "best"}
    assert set(found[2].tags) == {*two.row.tags[1:], "theirs"}
    # An older capture that is graded late is a later version, and not the newest.
    store.update(first, lambda m: msgspec.structs.replace(m, depth=77))
    assert push(store, url).sent == 1
    remote = spot.open(url)
    assert (remote.get(FIRST).version, remote.get(FIRST, "3").row.depth) == (2, 77)
    assert set(remote.get(FIRST, "3").row.aliases) == {"first"}
    remote.delete(remote.get(FIRST, "2"), force=True)
    done = push(store, url)
    assert (done.sent, done.known, done.removed) == (0, 5, 1)
    assert sorted(v.version for v in there(spot.open(url), {"fqn": "first"})) == [1, 3]
    done = push(store, url, again=True)
    replaced = 5 if "replace" in remote.capabilities else 0  # else what is there is left alone
    assert (done.sent, done.known, done.failed) == (1 + replaced, 5 - replaced, ())
    assert sorted(v.version for v in there(spot.open(url), {"fqn": "first"})) == [1, 3, 4]


class Named(nn.Module):
    """A child under any name that torch allows."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            rows = child(rows)
        return rows


def test_names_of_any_kind(spot: Spot, tmp_path: Path) -> None:
    repo, url = ml.Repo(tmp_path / "repo"), spot.fresh()
    model, names = "größe/v1.2 \N{SNOWMAN}", ["层", "a b", "l" * 300, "-x", "%2F:#?"]
    module = Named(*names)
    with ml.trace(module, name=model) as trace:
        module(torch.ones(1, 2))
    entries = repo.add(trace, verify=False)
    assert repo.push(url).sent == len(entries) == 1 + len(names)
    remote = spot.open(url)
    assert {v.row.name for v in there(remote)} == {entry.name for entry in entries}
    for entry in entries:
        (version,) = chosen(remote, entry.name, {})
        assert (version.row.model, version.row.fqn) == (model, entry.fqn)
        assert record_of(fetch(remote, version).metadata) == record_of(entry.metadata)


# ---- numbers


def test_a_hundred_entries_from_sixteen_threads(spot: Spot, tmp_path: Path) -> None:
    remote, total = spot.open(), 20 if spot.kind == "s3" else 100  # moto takes 10 ms a request
    drafts = [draft(tmp_path, f"layer{n % 5}", n) for n in range(total)]
    random.Random(0).shuffle(drafts)
    with ThreadPoolExecutor(16) as pool:
        versions = list(pool.map(remote.put, drafts))
    assert [v.identity for v in versions] == [d.identity for d in drafts]
    found = there(remote)
    assert numbered(found) == numbered(versions)
    for fqn in {v.row.fqn for v in found}:
        assert sorted(v.version for v in found if v.row.fqn == fqn) == [
            n + 1 for n in range(total // 5)
        ]


def test_twenty_puts_of_one_module_at_once(spot: Spot, tmp_path: Path) -> None:
    remote, total = spot.open(), 10 if spot.kind == "s3" else 20
    drafts, start = [draft(tmp_path, "first", n) for n in range(total)], threading.Barrier(total)

    def put(number: int) -> int:
        start.wait()
        return remote.put(drafts[number]).version

    with ThreadPoolExecutor(total) as pool:
        assert sorted(pool.map(put, range(total))) == list(range(1, total + 1))


def test_one_entry_put_by_eight_at_once_is_one_version(spot: Spot, tmp_path: Path) -> None:
    url, one, start = spot.fresh(), draft(tmp_path), threading.Barrier(8)
    remotes = [spot.open(url), spot.open(url)]

    def put(number: int) -> int:
        start.wait()
        return remotes[number % 2].put(one).version

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(put, range(8))) == {1}
    assert len(there(remotes[0])) == 1


def test_a_deleted_number_never_comes_back(remote: Remote, tmp_path: Path) -> None:
    one, two, three = (draft(tmp_path, seed=n) for n in range(3))
    remote.put(one)
    second = remote.put(two)
    remote.delete(second)
    for which in ("v2", "2"):
        with pytest.raises(NotFound):
            remote.get(FIRST, which)
    with pytest.raises(NotFound):
        remote.fetch(second, tmp_path)
    with pytest.raises(NotFound):
        remote.delete(second)
    assert remote.known({two.identity: FIRST}) == {}
    assert remote.get(FIRST).version == 1
    assert remote.put(three).version == 3
    again = remote.put(two)
    assert again.version == 4
    (tmp_path / "again").mkdir()
    remote.fetch(again, tmp_path / "again")
    assert (tmp_path / "again" / "metadata.json").read_bytes() == two.record
    assert sorted(v.version for v in there(remote)) == [1, 3, 4]


# ---- aliases and tags


def test_an_alias_moves(remote: Remote, tmp_path: Path) -> None:
    one = remote.put(draft(tmp_path, seed=1, aliases=("best", "old")))
    two = remote.put(draft(tmp_path, seed=2, aliases=("best",)))
    assert remote.get(FIRST, "best").version == 2
    assert remote.get(FIRST, "old").version == 1
    assert remote.get(FIRST).version == 2
    remote.alias(one, add=["best", "ünï.code"], remove=["old"])
    assert remote.get(FIRST, "best").version == remote.get(FIRST, "ünï.code").version == 1
    found = {v.version: v.row.aliases for v in there(remote)}
    assert found == {1: ("best", "ünï.code"), 2: ()}
    with pytest.raises(NotFound):
        remote.get(FIRST, "old")
    remote.alias(two, add=(), remove=["best"])  # it is not its own
    assert remote.get(FIRST, "best").version == 1
    for alias in ("v3", "3", "a@b", ""):
        with pytest.raises(UsageError):
            remote.alias(one, add=[alias], remove=())


def test_an_alias_protects_from_deletion(remote: Remote, tmp_path: Path) -> None:
    one = remote.put(draft(tmp_path, seed=1, aliases=("best",)))
    with pytest.raises(Conflict, match="best"):
        remote.delete(one)
    assert remote.get(FIRST, "best").version == 1
    remote.delete(one, force=True)
    assert there(remote) == []
    with pytest.raises(NotFound):
        remote.get(FIRST, "best")
    remote.put(draft(tmp_path, seed=2))
    with pytest.raises(NotFound):
        remote.get(FIRST, "best")


def test_tags_are_any_text(remote: Remote, tmp_path: Path) -> None:
    one = remote.put(draft(tmp_path, seed=1, tags=tuple(TEXTS[:4])))
    other = remote.put(draft(tmp_path, seed=2, tags=("other",)))
    remote.tag(one, add=TEXTS[4:], remove=())
    (found,) = there(remote, {"version": 1})
    assert sorted(found.row.tags) == sorted(TEXTS)
    for text in TEXTS:
        assert [v.version for v in there(remote, {"tags": text})] == [1]
    remote.tag(one, add=["new"], remove=[*TEXTS[1:], "unknown"])
    assert sorted(remote.get(FIRST, "1").row.tags) == ["new", "v2"]
    assert remote.get(FIRST, str(other.version)).row.tags == ("other",)


# ---- search


@settings(
    max_examples=1, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    rows=st.lists(ROWS, min_size=8, max_size=8),
    filters=st.lists(FILTERS, min_size=20, max_size=20),
)
def test_a_search_finds_what_the_evaluator_selects(
    spot: Spot, tmp_path_factory: pytest.TempPathFactory, rows, filters
) -> None:
    remote, folder = spot.open(), tmp_path_factory.mktemp("rows")
    filters = filters[:5] if spot.kind == "s3" else filters
    for number, wanted in enumerate(rows):
        plain = draft(folder, f"layer{number % 3}", number)
        remote.put(
            msgspec.structs.replace(
                plain, row=msgspec.structs.replace(wanted, id=plain.row.id, version=0, aliases=())
            )
        )
    found = everything(remote, {})
    assert len(found) == len(rows)
    for version, wanted in ((v, rows[int(_record(remote, v).rpartition(": ")[2])]) for v in found):
        kept = {"id": version.row.id, "version": version.version, "aliases": (), "tags": ()}
        assert msgspec.structs.replace(version.row, **kept) == msgspec.structs.replace(
            wanted, **kept
        )
        assert set(version.row.tags) == set(wanted.tags)
    for filter in filters:
        expected = [v for v in found if matches(v.row, filter)]
        assert numbered(everything(remote, filter)) == numbered(expected), filter


def _record(remote: Remote, version) -> str:
    with spool() as folder:
        remote.fetch(version, folder)
        return (folder / "metadata.json").read_text()


def test_paging_while_others_put(spot: Spot, tmp_path: Path) -> None:
    url = spot.fresh()
    remote, other = spot.open(url), spot.open(url)
    before = [remote.put(draft(tmp_path, f"layer{n % 3}", n)) for n in range(7)]
    page = remote.search({"model": "net"}, limit=2)
    found = list(page.versions)
    for number in range(10, 20):
        if not page.cursor:
            break
        other.put(draft(tmp_path, f"layer{number % 5}", number))
        page = remote.search({"model": "net"}, limit=2, cursor=page.cursor)
        assert len(page.versions) <= 2
        found += page.versions
    assert len(numbered(found)) == len({v.identity for v in found})
    assert {v.identity for v in before} <= {v.identity for v in found}


def test_nothing_there(remote: Remote, tmp_path: Path) -> None:
    assert there(remote) == []
    assert remote.known({"0" * 64: FIRST}) == {}
    for which in ("", "v1", "best", "../x"):
        with pytest.raises(NotFound):
            remote.get(FIRST, which)
    with pytest.raises(NotFound):
        chosen(remote, None, {})
    with pytest.raises(NotFound):
        chosen(remote, "net/first", {})


# ---- when it does not work


def test_a_remote_that_is_down_costs_seconds_and_nothing_else(
    spot: Spot, store: LocalStore
) -> None:
    if spot.down is None:
        pytest.skip("it cannot be down")
    url, before = spot.fresh(), contents(store)
    started = time.monotonic()
    with spot.down():
        with suppress(Unavailable):  # one that needs no connection to be made gives up by itself
            done = push(store, url, tries=1)
            assert (done.sent, done.waiting) == (0, 6)
        with pytest.raises(Unavailable):
            there(spot.open(url))
    assert time.monotonic() - started < 40
    outbox = Outbox(store.outbox_path)
    assert len(outbox.all(url, (WAITING,))) == 6
    assert contents(store) == before
    done = push(store, url)
    assert (done.sent, done.waiting) == (6, 0)
    assert len(there(spot.open(url))) == 6


def test_no_right_is_final(spot: Spot, store: LocalStore) -> None:
    if spot.denied is None:
        pytest.skip("it knows no rights")
    url = spot.fresh()
    with spot.denied(), pytest.raises(PermissionDenied) as caught:
        push(store, url)
    assert caught.value.hint
    waiting = Outbox(store.outbox_path).all(url, (WAITING,))
    assert [parcel.tries for parcel in waiting] == [0] * 6
    assert push(store, url).sent == 6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_large_tensor(spot: Spot, tmp_path: Path) -> None:
    """`MODULELENS_LARGE=1` tests 2 GiB and more, on every kind of remote."""
    large = "MODULELENS_LARGE" in os.environ
    if not large and spot.kind != "file":
        pytest.skip("takes long; set MODULELENS_LARGE")
    store, url = LocalStore(tmp_path / "repo"), spot.fresh()
    size = (2 << 30) + 3 if large else 300 << 20
    (digest,) = store.put_blobs([bytes(size)])
    put_entry(store, record_with("net", "first", blobs={digest: size}), {})
    assert push(store, url).sent == 1
    back = pulled(spot.open(url), tmp_path / "back")
    assert back.blob_path(digest).stat().st_size == size
