"""SDK-contract tests of the W&B registry: what is its own beside the contract of all remotes.

The unmodified SDK talks to the stand-in server, so nothing here says how W&B itself behaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.store.test_query import FILTERS, ROWS
from tests.wandb_server import Server, filters, serving
from tests.wandb_server.sdk import draft as wandb_draft

import modulelens.store.remote.registry_session as session
from modulelens.errors import (
    Conflict,
    Corrupted,
    EnvironmentLacks,
    NotFound,
    PermissionDenied,
    Unavailable,
    UsageError,
)
from modulelens.store import matches
from modulelens.store.facts import Row
from modulelens.store.files import digest_of
from modulelens.store.query import parse
from modulelens.store.remote import Draft, Pack, Version, open_remote
from modulelens.store.remote import registry_search as facts
from modulelens.store.remote.registry import RegistryRemote

wandb = pytest.importorskip("wandb")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("wandb")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The server without faults and counts; what it doesn't know fails the test that asked."""
    shared.heal()
    shared.forget()
    yield shared
    shared.set(read_only=[], search_lag_s=0.0)
    assert not shared.unknown


@pytest.fixture
def remote(server: Server, request: pytest.FixtureRequest) -> Iterator[RegistryRemote]:
    """One on a registry of the test's own, which does not exist yet."""
    opened = RegistryRemote(f"wandb://team/r-{digest_of(request.node.name.encode())[:12]}")
    yield opened
    opened.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are not answered are given up after two seconds."""
    monkeypatch.setattr(session, "CALL_S", 2)
    monkeypatch.setattr(session, "INIT_S", 1)


class Shelf:
    """Drafts of modules, and packs, with files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draft(self, fqn: str = "over_arch", n: int = 0, run: str = "", **facts: Any) -> Draft:
        record = json.dumps({"fqn": fqn, "n": n}).encode()
        state = self.folder / f"{fqn}-{n}.pt"
        state.write_bytes(b"state of " + record)
        row = Row(
            id=f"{hashlib.md5(f'dlrm/{fqn}'.encode()).hexdigest()}/{n + 1}",
            **{"name": f"dlrm/{fqn}", "model": "dlrm", "fqn": fqn, "cls": "shop.ranking:MLP"}
            | {"version": n + 1, "params": n}
            | facts,
        )
        return Draft(identity=digest_of(record), row=row, record=record, state=state, run=run)

    def packs(self, *contents: bytes) -> dict[Path, Pack]:
        packs = {}
        for content in contents:
            name = digest_of(content)
            (self.folder / name).write_bytes(content)
            packs[self.folder / name] = Pack(name, {name: len(content)})
        return packs

    def empty(self) -> Path:
        folder = self.folder / f"empty-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return folder


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def silent(_: int) -> None:
    """Progress that nobody looks at."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_entry_comes_back_with_its_three_files(remote, shelf, server):
    draft = shelf.draft(tags=("base", "layer1.0"), aliases=("best",), file="m.py")
    version = remote.put(draft)
    assert (version.identity, version.version, version.collection) == (
        draft.identity,
        1,
        draft.collection,
    )
    assert version.row == draft.row
    remote.fetch(version, folder := shelf.empty())
    assert contents(folder) == {
        "metadata.json": draft.record,
        "state.pt": draft.state.read_bytes(),
        "packs.json": draft.index,
    }
    collection = next(iter(remote._find_registry().collections()))
    assert (collection.name, collection.description) == (
        draft.collection,
        "dlrm/over_arch: shop.ranking:MLP in m.py",
    )


def test_an_entry_that_is_there_is_found_by_one_question(remote, shelf, server):
    draft = shelf.draft()
    version = remote.put(draft)
    assert remote.put(draft) == version
    server.forget()
    assert remote.put(draft) == version
    assert server.operations() == {"RegistryVersions": 1}
    again = remote.put(shelf.draft(tags=("x.y", "z"), aliases=("best",)))
    assert (again.version, again.row.tags, again.row.aliases) == (1, ("x.y", "z"), ("best",))
    assert not server.bytes()["puts"]


def test_an_entry_is_found_where_the_search_lags_behind(remote, shelf, server):
    server.set(search_lag_s=60.0)
    draft = shelf.draft()
    version = remote.put(draft)
    assert not remote.known({draft.identity: draft.collection})
    assert remote.put(draft) == version


def test_versions_count_from_one_and_none_comes_twice(remote, shelf):
    numbers = [remote.put(shelf.draft(n=n)).version for n in range(3)]
    assert numbers == [1, 2, 3]
    collection = shelf.draft().collection
    wanted = {"": 3, "2": 2, "v1": 1, "latest": 3}
    assert {which: remote.get(collection, which).version for which in wanted} == wanted
    remote.delete(remote.get(collection))
    assert remote.get(collection).version == 2
    assert remote.put(shelf.draft(n=2)).version == 4
    for absent in ("3", "v0", "0", "v9", "best", "a/b", "a:b"):
        with pytest.raises(NotFound):
            remote.get(collection, absent)


def test_an_alias_moves_and_protects(remote, shelf):
    first, second = (remote.put(shelf.draft(n=n, aliases=("best",))) for n in range(2))
    assert remote.get(first.collection, "best") == second
    remote.alias(first, add=["best", "small"], remove=["unknown"])
    assert remote.get(first.collection, "best").version == 1
    assert remote.get(first.collection, "2").row.aliases == ()
    with pytest.raises(Conflict, match="best, small"):
        remote.delete(first)
    remote.alias(first, add=[], remove=["small"])
    remote.delete(first, force=True)
    with pytest.raises(NotFound):
        remote.get(first.collection, "best")
    with pytest.raises(NotFound):
        remote.fetch(first, shelf.empty())


@pytest.mark.parametrize("alias", ["latest", "a/b", "a:b", "v3", "", "x" * 129])
def test_an_alias_that_cannot_be_is_refused_before_anything_is_sent(remote, shelf, server, alias):
    server.forget()
    with pytest.raises(UsageError):
        remote.put(shelf.draft(aliases=(alias,)))
    assert not server.operations()


def test_tags_are_native_where_they_can_be(remote, shelf):
    version = remote.put(shelf.draft(tags=("fast", "layer1.0", "two words")))
    remote.tag(version, add=["a.b", "new"], remove=["fast", "layer1.0"])
    assert remote.get(version.collection).row.tags == ("two words", "a.b", "new")
    linked = remote._session.artifact(version.place)
    assert sorted(linked.tags) == ["new", "two words"]
    source = linked.source_artifact
    source.tags = ["by hand"]  # somebody, in the app
    source.save()
    assert remote.get(version.collection).row.tags == ("a.b", "by hand")


def test_deleting_keeps_what_another_registry_links_to(remote, shelf, server):
    version = remote.put(shelf.draft())
    other = RegistryRemote("wandb://team/other-registry")
    other._find_registry(create=True)
    source = remote._session.artifact(version.place).source_artifact
    source.link(f"{other._path}/{version.collection}")
    remote.delete(version)
    other.fetch(other.get(version.collection), folder := shelf.empty())
    assert contents(folder)["state.pt"]
    other.delete(other.get(version.collection))
    with pytest.raises(NotFound):
        remote._session.artifact(source.qualified_name)
    other.close()


def test_packs_go_once(remote, shelf, server):
    sent, came = [], []
    one, two = shelf.packs(b"a" * 1000, b"b" * 2000), shelf.packs(b"b" * 2000, b"c" * 3000)
    placed = remote.put_packs(one, label="dlrm", progress=sent.append)
    assert [pack.name for pack in placed] == [pack.name for pack in one.values()]
    assert all(pack.place for pack in placed)
    assert remote.put_packs(one, label="dlrm", progress=sent.append) == placed
    more = remote.put_packs(two, label="dlrm", progress=sent.append)
    assert more[0] == placed[1]
    assert sum(sent) == 6000
    server.forget()
    later = RegistryRemote(remote.url)
    assert later.put_packs(one, label="dlrm", progress=sent.append) == placed
    later.close()
    assert not server.bytes()["puts"]
    assert sum(sent) == 6000
    assert remote.put_packs({}, label="nothing", progress=sent.append) == ()
    remote.fetch_packs([placed[1], more[1]], folder := shelf.empty(), progress=came.append)
    assert contents(folder) == {pack.name: path.read_bytes() for path, pack in two.items()}
    assert sum(came) == 5000 == sum(server.bytes()[kind] for kind in ("got_bytes",))


def test_what_trained_the_model_is_shown_as_producer(remote, shelf, server):
    with wandb.init(entity="team", project="ranking") as trainer:
        run = trainer.path
    version = remote.put(shelf.draft(run=run))
    created = [call["variables"] for call in server.calls("CreateArtifact")]
    assert created[-1]["runName"] == trainer.id
    source = remote._session.artifact(version.place).source_artifact
    assert (source.project, source.metadata["run"]) == ("ranking", run)
    assert source.logged_by().job_type == "module-capture"
    elsewhere = remote.put(shelf.draft(n=1, run="test-org/other/abc"))
    source = remote._session.artifact(elsewhere.place).source_artifact
    assert (source.project, source.metadata["run"]) == ("modulelens", "test-org/other/abc")
    with pytest.warns(UserWarning, match="not shown at its run team/ranking/gone"):
        assert remote.put(shelf.draft(n=2, run="team/ranking/gone")).version == 3


def test_a_registry_that_is_not_there_is_empty_and_comes_with_the_first_put(remote, shelf, server):
    draft = shelf.draft()
    assert remote.search({}, limit=5).versions == ()
    assert remote.known({draft.identity: draft.collection}) == {}
    with pytest.raises(NotFound):
        remote.get(draft.collection)
    assert not server.operations()["UpsertRegistry"]
    remote.put(draft)
    made = server.calls("UpsertRegistry")[0]["variables"]["input"]
    assert made["artifactTypes"] == [{"name": "module"}]


def test_the_users_runs_stay_the_users(remote, shelf, server):
    remote.put(shelf.draft())
    assert wandb.run is None
    with wandb.init(entity="team", project="mine") as mine:
        assert wandb.run is mine
        assert mine.project == "mine"
        remote.put(shelf.draft(n=1, run=mine.path))
        assert wandb.run is mine
        logged = wandb_draft(shelf.folder / "own", "own", {"f": b"x"})
        logged.save()
        assert logged.wait(10).logged_by().id == mine.id
    remote.put(shelf.draft(n=2))
    kinds = [call["variables"]["jobType"] for call in server.calls("UpsertBucket")]
    assert kinds.count("module-capture") == 2  # one per project, for the life of the remote


def test_the_environment_of_a_training_run_is_not_taken_for_the_uploads(
    remote, shelf, server, monkeypatch
):
    values = {"RUN_ID": "training", "RESUME": "must", "NAME": "mine", "JOB_TYPE": "train"}
    for name, value in values.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    opened = RegistryRemote(remote.url)
    opened.put(shelf.draft())
    opened.close()
    made = server.calls("UpsertBucket")[0]["variables"]
    assert made["name"] != "training"
    assert (made["displayName"], made["jobType"]) == ("module-capture", "module-capture")
    wandb.teardown()


def test_nothing_of_this_machine_is_told_or_left(remote, shelf, server, tmp_path):
    client = server.folder.parent / "client"
    before = {path for path in client.rglob("*") if path.is_file()}
    old = set(server.folder.rglob("manifest/*"))
    version = remote.put(shelf.draft())
    packs = remote.put_packs(shelf.packs(b"p" * 100), label="dlrm", progress=silent)
    remote.fetch(version, shelf.empty())
    remote.fetch_packs(packs, shelf.empty(), progress=silent)
    run = server.calls("UpsertBucket")[0]["variables"]
    assert (run["program"], run["host"], run["repo"]) == ("modulelens", None, None)
    manifests = [
        json.loads(path.read_bytes())["contents"]
        for path in set(server.folder.rglob("manifest/*")) - old
    ]
    paths = [file["local_path"] for manifest in manifests for file in manifest.values()]
    assert paths
    assert all(path.startswith("/tmp/modulelens-wandb-") for path in paths)
    assert not [path for path in paths if str(tmp_path) in path]
    assert list(Path(remote._session._folder.name).glob("files-*")) == []
    new = {path for path in client.rglob("*") if path.is_file()} - before
    assert {path.suffix for path in new} <= {".log"}
    assert not [name for name in os.environ if name.startswith("WANDB_SERVICE")]
    assert not (client / "home" / "netrc").exists()
    spool = Path(remote._session._folder.name)
    remote.close()
    assert not spool.exists()


def test_what_a_dead_process_spooled_is_swept(server, monkeypatch):
    old, new = (Path("/tmp") / f"modulelens-wandb-test-{os.getpid()}-{n}" for n in range(2))
    for path in (old, new):
        (path / "files-x").mkdir(parents=True)
    os.utime(old, (0, 0))
    session._spool().cleanup()
    assert not old.exists()
    assert new.exists()
    (new / "files-x").rmdir()
    new.rmdir()


def test_a_spool_that_was_swept_comes_back(remote, shelf):
    remote.put(shelf.draft())
    shutil.rmtree(remote._session._folder.name)
    assert remote.put(shelf.draft(n=1)).version == 2


# What goes wrong.


@pytest.mark.parametrize(
    ("kind", "match", "how"),
    [
        ("put", "blob/", {"status": 403}),
        ("put", "blob/", {"drop": True}),
        ("put", "manifest/", {"status": 503}),
        ("gql", "CommitArtifact", {"status": 500}),
        ("gql", "LinkArtifact", {"drop": True, "after": True}),
        ("gql", "CreateArtifact$", {"status": 429, "headers": {"Retry-After": "1"}}),
        ("get", "blob/", {"status": 403}),
        ("get", "blob/", {"truncate": True}),
        ("get", "blob/", {"drop": True}),
        ("get", "blob/", {"status": 503}),
    ],
)
def test_one_fault_is_lived_through(remote, shelf, server, kind, match, how):
    (path, _), *_ = shelf.packs(b"p" * 1000).items()
    server.fail(kind, match, n=1, **how)
    packs = remote.put_packs(
        shelf.packs(path.read_bytes() + os.urandom(4)), label="", progress=silent
    )
    version = remote.put(shelf.draft(fqn=f"{kind}-{match}-{how}"[:60].replace("/", "")))
    remote.fetch(version, shelf.empty())
    remote.fetch_packs(packs, shelf.empty(), progress=silent)
    assert server.report()["faults_taken"]
    assert version.version == 1


@pytest.mark.parametrize(
    ("kind", "match", "how", "error"),
    [
        ("gql", "LinkArtifact", {"status": 403}, PermissionDenied),
        ("gql", "LinkArtifact", {"message": "type not allowed"}, PermissionDenied),
        ("gql", "CreateArtifact$", {"message": "permission denied"}, PermissionDenied),
        ("gql", "CommitArtifact", {"message": "digest mismatch"}, PermissionDenied),
        ("gql", "CommitArtifact", {"status": 409}, Unavailable),
        ("gql", "CommitArtifact", {"status": 500}, Unavailable),
        ("gql", "CreateArtifact$", {"status": 403}, PermissionDenied),
        ("gql", "UpsertBucket", {"status": 403}, PermissionDenied),
        ("gql", "UpsertRegistry", {"status": 403}, PermissionDenied),
        ("put", "blob/", {"status": 403}, Unavailable),
        ("put", "blob/", {"status": 503}, Unavailable),
        ("gql", "RegistryVersions", {"status": 429}, Unavailable),
        ("gql", "FetchRegistry", {"status": 502}, Unavailable),
        ("gql", "LinkArtifact", {"drop": True}, Unavailable),
    ],
)
def test_a_put_that_fails_says_why_and_shows_nothing(
    hasty, remote, shelf, server, kind, match, how, error
):
    draft = shelf.draft(fqn=f"{kind}-{match}-{how}"[:60].replace("/", ""), n=2)
    if match == "RegistryVersions":  # nobody asks a registry that is not there
        remote.put(shelf.draft(n=1))
    server.fail(kind, match, n=-1, **how)
    began = time.monotonic()
    with pytest.raises(error) as caught:
        remote.put(draft)
    assert time.monotonic() - began < 15
    assert remote._path in str(caught.value) or draft.collection in str(caught.value)
    server.heal()
    assert not remote.known({draft.identity: draft.collection})
    assert remote.put(draft).version == 1


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"status": 403}, PermissionDenied),
        ({"status": 404}, NotFound),
        ({"status": 503}, Unavailable),
        ({"truncate": True}, Unavailable),
        ({"short": True}, Corrupted),
    ],
)
def test_a_fetch_that_fails_says_why(remote, shelf, server, how, error):
    version = remote.put(shelf.draft())
    server.fail("get", "blob/", n=-1, **how)
    with pytest.raises(error):
        remote.fetch(version, shelf.empty())
    server.heal()
    remote.fetch(version, shelf.empty())


def test_bytes_that_were_damaged_on_their_way_stay_in_no_cache(remote, shelf, server):
    packs = remote.put_packs(shelf.packs(b"p" * 1000), label="", progress=silent)
    server.fail("get", "blob/", n=1, corrupt=True)
    remote.fetch_packs(packs, damaged := shelf.empty(), progress=silent)
    assert contents(damaged) != {packs[0].name: b"p" * 1000}
    remote.fetch_packs(packs, clean := shelf.empty(), progress=silent)
    assert contents(clean) == {packs[0].name: b"p" * 1000}


@pytest.mark.parametrize("place", ["", "a/b/c", "a/b/c:latest", "a/b/../c:v0", "http://x/y/z:v0"])
def test_packs_of_a_place_that_is_none_are_refused(remote, shelf, place):
    with pytest.raises((Corrupted, NotFound)):
        remote.fetch_packs([Pack("x", {"x": 1}, place)], shelf.empty(), progress=silent)


def test_a_pack_that_its_bundle_has_not_is_named(remote, shelf):
    (pack,) = remote.put_packs(shelf.packs(b"p" * 10), label="", progress=silent)
    with pytest.raises(Corrupted, match=r"no '\.\./x'"):
        remote.fetch_packs([Pack("../x", {"x": 1}, pack.place)], shelf.empty(), progress=silent)


def test_what_strangers_put_in_the_registry_hides_nothing(remote, shelf, server):
    version = remote.put(shelf.draft())
    registry = remote._find_registry()
    registry.artifact_types.append("model")
    registry.save()
    with wandb.init(entity="team", project="strange") as run:
        kinds = [("model", {}), ("module", {"identity": 3}), ("module", {"cls": 1}), ("module", {})]
        for n, (kind, metadata) in enumerate(kinds):
            strange = wandb.Artifact(f"strange-{n}", kind, metadata=metadata)
            (shelf.folder / f"{n}").write_text(f"{n}")
            strange.add_file(str(shelf.folder / f"{n}"), policy="immutable", skip_cache=True)
            logged = run.log_artifact(strange).wait(10)
            logged.link(f"{remote._path}/strange-{n}")
    with pytest.warns(UserWarning, match="left out of the search"):
        assert remote.search({}, limit=9).versions == (version,)


# The connection.


@pytest.mark.parametrize(
    "url", ["wandb://", "wandb://a/b/c", "wandb://a/b?c", "wandb:///x", "wandb://a/" + "x" * 114]
)
def test_a_url_that_names_no_registry(server, url):
    with pytest.raises(UsageError):
        open_remote(url)


def test_urls(server):
    for url, path in (
        ("wandb://team/lens", "test-org/wandb-registry-lens"),
        ("wandb://lens", "test-org/wandb-registry-lens"),
        ("wandb://team/", "test-org/wandb-registry-modulelens"),
        ("wandb://tester/lens", "test-org/wandb-registry-lens"),
    ):
        opened = open_remote(url)
        assert (opened._path, opened.url) == (path, url)
        assert opened._session.entity == ("tester" if "tester" in url else "team")
        opened.close()


def test_somebody_without_an_organization(server):
    with pytest.raises(UsageError, match="'loner' has no W&B organization"):
        open_remote("wandb://loner/lens")


@pytest.mark.parametrize(
    ("changes", "error", "hint"),
    [
        ({"WANDB_API_KEY": None}, PermissionDenied, "WANDB_API_KEY"),
        ({"WANDB_API_KEY": "x" * 40}, PermissionDenied, "WANDB_API_KEY"),
        ({"WANDB_API_KEY": "short"}, PermissionDenied, "WANDB_API_KEY"),
        ({"WANDB_MODE": "offline"}, Unavailable, "WANDB_MODE"),
        ({"WANDB_MODE": "disabled"}, Unavailable, "WANDB_MODE"),
        ({"WANDB_BASE_URL": "http://127.0.0.1:9"}, Unavailable, "try again"),
    ],
)
def test_a_connection_that_cannot_be_made(hasty, server, monkeypatch, changes, error, hint):
    wandb.teardown()
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(error) as caught:
        open_remote("wandb://team/lens")
    assert hint in caught.value.hint
    assert time.monotonic() - began < 10
    wandb.teardown()


def test_nobody_is_asked_for_a_key_at_a_terminal(server):
    code = "from modulelens.store.remote import open_remote; open_remote('wandb://team/lens')"
    terminal, side = os.openpty()
    environment = {name: value for name, value in server.env.items() if name != "WANDB_API_KEY"}
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=side,
        stdout=side,
        stderr=side,
        timeout=60,
        check=False,
    )
    said = os.read(terminal, 1 << 16).decode()
    os.close(side)
    os.close(terminal)
    assert asked.returncode
    assert "no key for" in said


def test_a_key_that_may_only_read(remote, shelf, server, monkeypatch):
    version = remote.put(shelf.draft())
    remote.close()
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", server.read_key)
    reader = open_remote(remote.url)
    reader.fetch(version, shelf.empty())
    assert reader.search({}, limit=1).versions == (version,)
    for refused in (
        lambda: reader.put(shelf.draft(n=1)),
        lambda: reader.alias(version, add=["a"], remove=[]),
        lambda: reader.tag(version, add=["a"], remove=[]),
        lambda: reader.delete(version),
        lambda: reader.put_packs(shelf.packs(b"p"), label="", progress=silent),
    ):
        with pytest.raises(PermissionDenied):
            refused()
    elsewhere = open_remote("wandb://team/not-there")
    with pytest.raises(PermissionDenied) as caught:
        elsewhere.put(shelf.draft())
    assert "admin" in caught.value.hint
    for opened in (reader, elsewhere):
        opened.close()
    wandb.teardown()


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentLacks) as caught:
        open_remote("wandb://team/lens")
    assert caught.value.hint == "pip install 'modulelens[wandb]'"


def test_the_sdk_is_imported_by_opening_only():
    code = (
        "import sys, modulelens, modulelens.store.remote.registry; sys.exit('wandb' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


# Searches.


@settings(max_examples=150, deadline=None)
@given(row=ROWS, filter=FILTERS)
def test_what_is_pushed_down_selects_at_least_what_the_filter_does(row, filter):
    draft = Draft(identity="i", row=row, record=b"", state=Path())
    metadata = json.dumps({"metadata": facts.metadata_of(draft)})
    pushed = facts.pushed(parse(filter))
    if pushed is not None and matches(row, filter):
        assert filters.matches(pushed, lambda name: filters.in_metadata(metadata, name.split(".")))


@settings(max_examples=50, deadline=None)
@given(row=ROWS)
def test_a_row_comes_back_from_metadata(row):
    draft = Draft(identity="i", row=row, record=b"", state=Path())
    metadata = json.loads(json.dumps(facts.metadata_of(draft)))
    place = f"o/r/{draft.collection}:v{row.version - 1}"
    native = [tag for tag in row.tags if facts.is_native(tag)]
    back = facts.version_of(metadata, place, row.aliases, native)
    assert matches(back.row, {"aliases": {"$exists": bool(back.row.aliases)}})
    assert {**as_dict(back.row), "aliases": 0, "tags": 0} == {
        **as_dict(row),
        "aliases": 0,
        "tags": 0,
    }
    assert set(back.row.tags) == set(row.tags)


def as_dict(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__struct_fields__}


@pytest.fixture(scope="module")
def stocked(shared: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryRemote]:
    """A registry with 24 modules of different facts."""
    opened = RegistryRemote("wandb://team/stocked")
    shelf = Shelf(tmp_path_factory.mktemp("stock"))
    drafts = [
        shelf.draft(
            fqn=f"layers.{n % 8}",
            n=n,
            cls=f"shop.ranking:{'MLP' if n % 2 else 'Attention'}",
            dtypes=("float32", "bfloat16")[: n % 3],
            latency_s=n / 10 if n % 4 else None,
            flops=2**53 + n,
            grade=("exact", "close", None)[n % 3],
            tags=("v1.0", "base")[: n % 3],
        )
        for n in range(24)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(opened.put, drafts))
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("filter", "is_pushed"),
    [
        ({}, False),
        ({"cls": "MLP"}, True),
        ({"params": {"$ge": 3, "$lt": 9}}, True),
        ({"params": {"$in": [1, 5, 99]}, "grade": "close"}, True),
        ({"$or": [{"fqn": "layers.1"}, {"latency_s": {"$gt": 1.5}}]}, True),
        ({"$or": [{"fqn": "layers.1"}, {"tags": "v1.0"}]}, False),
        ({"dtypes": "bfloat16"}, False),
        ({"flops": 2**53 + 1}, False),
        ({"flops": {"$gt": 2**53 + 20}}, False),
        ({"grade": None}, False),
        ({"$not": {"params": {"$lt": 20}}}, False),
        ({"cls": {"$regex": "^Att"}, "params": {"$le": 10}}, True),
        ({"version": 2}, False),
    ],
)
def test_a_search_finds_what_the_evaluator_says(stocked, server, filter, is_pushed):
    every = stocked.search({}, limit=100).versions
    assert len(every) == 24
    server.forget()
    found = stocked.search(filter, limit=100)
    assert set(found.versions) == {v for v in every if matches(v.row, filter)}
    assert found.cursor == ""
    sent = [call["variables"].get("artifactFilter") for call in server.calls("RegistryVersions")]
    assert [bool(json.loads(text or "{}")) for text in sent] == [is_pushed]


@pytest.mark.parametrize("advanced", [False, True])
def test_each_version_comes_once_while_others_insert(remote, shelf, server, monkeypatch, advanced):
    monkeypatch.setattr("modulelens.store.remote.registry.PAGE", 4)
    server.set(advanced_search=advanced)
    there = {remote.put(shelf.draft(fqn=f"f{n}", n=n)).row.id for n in range(7)}
    found: list[str] = []
    cursor = ""
    for n in range(20, 40):
        page = remote.search({"params": {"$ge": 0}}, limit=2, cursor=cursor)
        assert len(page.versions) <= 2
        found += [version.row.id for version in page.versions]
        remote.put(shelf.draft(fqn=f"f{n}", n=n))
        if not (cursor := page.cursor):
            break
    assert not cursor
    assert len(set(found)) == len(found)
    assert there <= set(found)
    server.set(advanced_search=False)


def test_a_cursor_that_is_none(stocked):
    for cursor in ("x", "bm9uc2Vuc2U", "\N{SNOWMAN}"):
        with pytest.raises(UsageError):
            stocked.search({}, limit=1, cursor=cursor)


def test_a_server_that_refuses_filters_is_searched_whole(stocked, server, monkeypatch):
    every = stocked.search({}, limit=100).versions
    monkeypatch.setattr(stocked, "_filters", True)
    server.fail("gql", "RegistryVersions", n=1, message="unknown filter operator: $in")
    wanted = {version.identity: version.collection for version in every[:3]}
    assert set(stocked.known(wanted)) == set(wanted)
    server.forget()
    assert stocked.search({"params": 3}, limit=9).versions
    assert [call["variables"].get("artifactFilter") for call in server.calls()] == [None]


def test_known_asks_for_many_at_once(stocked, server):
    every = stocked.search({}, limit=100).versions
    wanted = {version.identity: version.collection for version in every}
    wanted |= {digest_of(b"%d" % n): every[0].collection for n in range(150)}
    elsewhere = every[0].identity
    wanted[elsewhere] = every[1].collection if every[1].collection != every[0].collection else "x"
    server.forget()
    found = stocked.known(wanted)
    assert found == {v.identity: v for v in every if v.identity != elsewhere}
    assert server.operations() == {"RegistryVersions": 2}


# Killed, and many at once.

PUTTING = """
import sys
from pathlib import Path
from tests.remote.test_registry import Shelf
from modulelens.store.remote import open_remote
remote = open_remote(sys.argv[1])
print(remote._session._folder.name, flush=True)
remote.put(Shelf(Path(sys.argv[2])).draft())
"""


@pytest.mark.parametrize("operation", ["CommitArtifact", "LinkArtifact"])
def test_what_a_killed_process_was_putting_is_there_once(remote, shelf, server, operation):
    server.fail("gql", operation, n=1, delay_s=1.0)
    environment = server.env | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PUTTING, remote.url, str(shelf.folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as putting:
        spool = putting.stdout.readline().strip()
        while not server.operations()[operation]:
            assert putting.poll() is None
            time.sleep(0.05)
        putting.kill()
    shutil.rmtree(spool)
    version = remote.put(shelf.draft())
    time.sleep(1.0)
    assert remote.search({}, limit=9).versions == (remote.get(version.collection),) == (version,)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_many_threads_put_and_fetch(restless, remote, shelf, server):
    def there_and_back(n: int) -> Version:
        draft = shelf.draft(fqn=f"layer{n}", n=n, tags=("t",), aliases=("best",))
        version = remote.put(draft)
        folder = shelf.folder / f"back-{n}"
        folder.mkdir()
        remote.fetch(version, folder)
        assert (folder / "metadata.json").read_bytes() == draft.record
        assert remote.get(draft.collection, "best") == version
        return version

    with ThreadPoolExecutor(16) as pool:
        versions = list(pool.map(there_and_back, range(120)))
    assert {version.version for version in versions} == {1}
    assert server.operations()["CommitArtifact"] == 120


def test_writers_of_one_module_never_get_one_number(remote, shelf):
    second = RegistryRemote(remote.url)
    with ThreadPoolExecutor(12) as pool:
        puts: list[Callable[[Draft], Version]] = [remote.put, second.put]
        drafts = [shelf.draft(n=n) for n in range(12)]
        versions = list(pool.map(lambda n: puts[n % 2](drafts[n]), range(12)))
    assert sorted(version.version for version in versions) == list(range(1, 13))
    with ThreadPoolExecutor(4) as pool:
        same = list(pool.map(lambda n: puts[n % 2](shelf.draft(n=77)), range(4)))
    assert {version.version for version in same} == {13}
    second.close()
