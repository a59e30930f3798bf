"""A folder as a remote: damage at rest, foreign files, late listings, rights, full disks, forks."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.remote.conftest import (
    Spot,
    at_s3,
    contents,
    draft,
    numbered,
    objects,
    pulled,
    push,
    records,
    there,
)
from tests.store.samples import Child, run

from modulelens.errors import (
    Corrupted,
    DiskFull,
    EnvironmentLacks,
    NotFound,
    PermissionDenied,
    SchemaTooNew,
    Unavailable,
    UsageError,
)
from modulelens.records import collection_id
from modulelens.store import LocalStore
from modulelens.store.remote import Remote, open_remote
from modulelens.store.remote.folder import FolderRemote
from modulelens.store.remote.objects import Objects
from modulelens.store.remote.outbox import WAITING, Outbox
from modulelens.store.remote.pull import everything, pull

FIRST = collection_id("net", "first")
NOBODY = 65_534


@pytest.fixture
def team(tmp_path: Path) -> Path:
    return tmp_path / "team"


@pytest.fixture
def remote(team: Path) -> Remote:
    return open_remote(f"file://{team}")


def again(team: Path) -> Remote:
    """Another process's view: nothing is remembered."""
    return open_remote(f"file://{team}")


# ---- what lies there


def test_objects_are_named_by_digests_and_numbers_only(
    remote: Remote, team: Path, tmp_path: Path
) -> None:
    one = draft(tmp_path, "../../evil", model="/etc", tags=("../tag",), aliases=("../alias", "CON"))
    remote.put(one)
    names = set(objects(team))
    home = one.collection
    assert {name for name in names if name.count("/") < 3} == {
        "format.json",
        f"index/{home}/1.json",
    }
    assert all(set(name) <= set("0123456789abcdefghijklmnopqrstuvwxyz./") for name in names)
    assert sorted(there(again(team))[0].row.aliases) == ["../alias", "CON"]


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff", b"[" * 10**5, b'{"identity": "../../../etc", "row": 5}'],
    ids=["empty", "no fields", "no text", "deep", "wrong"],
)
def test_a_damaged_number_hides_no_other(
    remote: Remote, team: Path, tmp_path: Path, data: bytes
) -> None:
    for seed in range(3):
        remote.put(draft(tmp_path, seed=seed, tags=("tag",), aliases=(f"alias{seed}",)))
    (team / f"index/{FIRST}/2.json").write_bytes(data)
    mine = again(team)
    with pytest.warns(UserWarning, match=r"2\.json is left out"):
        assert [v.version for v in there(mine)] == [1, 3]
    assert mine.get(FIRST, "alias2").version == 3
    for which in ("v2", "alias1"):
        with pytest.raises(NotFound):
            mine.get(FIRST, which)
    assert mine.put(draft(tmp_path, seed=1)).version == 4
    assert mine.put(draft(tmp_path, seed=0)).version == 1


def test_a_number_of_another_module_or_with_a_hostile_identity_is_left_out(
    remote: Remote, team: Path, tmp_path: Path
) -> None:
    remote.put(draft(tmp_path, "first"))
    remote.put(draft(tmp_path, "second"))
    index = team / "index"
    other = (index / collection_id("net", "second") / "1.json").read_bytes()
    own = (index / FIRST / "1.json").read_bytes()
    identity = draft(tmp_path, "first").identity.encode()
    (index / FIRST / "2.json").write_bytes(other)
    (index / FIRST / "3.json").write_bytes(own.replace(identity, b"../" * 21 + b"x"))
    with pytest.warns(UserWarning, match="left out"):
        assert [v.version for v in there(again(team), {"fqn": "first"})] == [1]


def test_damaged_tags_and_aliases_hide_nothing_else(
    remote: Remote, team: Path, tmp_path: Path
) -> None:
    remote.put(draft(tmp_path, tags=("a", "b"), aliases=("x", "y")))
    for kind in ("tags", "aliases"):
        path = next(path for path in (team / "index" / FIRST / kind).rglob("*") if path.is_file())
        path.write_bytes(b"{")
    with pytest.warns(UserWarning, match="left out"):
        (found,) = there(again(team))
    assert len(found.row.tags) == len(found.row.aliases) == 1


def test_foreign_files_are_no_versions(remote: Remote, team: Path, tmp_path: Path) -> None:
    remote.put(draft(tmp_path))
    for name in (
        ".DS_Store",
        "index/Thumbs.db",
        "index/desktop.ini",
        f"index/{FIRST}/.nfs0001",
        f"index/{FIRST}/1 (copy).json",
        f"index/{FIRST}/01.json",
        f"index/{FIRST}/9999999999.json",
        f"index/{FIRST}/tags/x",
        f"index/{FIRST}/aliases/x",
        f"index/{FIRST}/aliases/deep/er",
        "index/xyz/1.json",
    ):
        (team / name).parent.mkdir(parents=True, exist_ok=True)
        (team / name).write_bytes(b"x")
    mine = again(team)
    assert [v.version for v in there(mine)] == [1]
    assert mine.put(draft(tmp_path, seed=1)).version == 2


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(
        bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    ),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("what", ["metadata.json", "state.pt", "packs.json", "packs"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_at_rest_is_named_and_mended_by_what_was_there(
    store: LocalStore, team: Path, tmp_path: Path, what: str, damage: str
) -> None:
    push(store, f"memory://{team}")
    mine = open_remote(f"memory://{team}")
    from fsspec.implementations.memory import MemoryFileSystem

    names = [name for name in MemoryFileSystem.store if str(team) in name and f"/{what}" in name]
    name, path = min(names), tmp_path / "object"
    path.write_bytes(whole := MemoryFileSystem.store[name].getvalue())
    DAMAGE[damage](path)
    filesystem = MemoryFileSystem()
    filesystem.rm_file(name)
    if path.exists():
        filesystem.pipe_file(name, path.read_bytes())
    back = LocalStore(tmp_path / "back")
    with pytest.raises((Corrupted, NotFound)):
        pull(back, mine, everything(mine, {}))
    assert all(record_bytes == contents(store)[i] for i, record_bytes in contents(back).items())
    filesystem.pipe_file(name, whole)
    pull(back, mine, everything(mine, {}))
    assert contents(back) == contents(store)


def test_a_pack_that_came_short_is_sent_again(store: LocalStore, team: Path) -> None:
    push(store, f"file://{team}")
    pack = max(path for path in (team / "packs").rglob("*") if path.is_file())
    whole = pack.read_bytes()
    pack.write_bytes(whole[:-1])
    for path in (team / "index").rglob("*.json"):
        path.unlink()  # as if the pusher had died before
    assert push(store, f"file://{team}").sent == 6
    assert pack.read_bytes() == whole


def test_a_newer_format_is_refused(store: LocalStore, team: Path) -> None:
    push(store, f"file://{team}")
    (team / "format.json").write_bytes(b'{"schema":99,"more":1}')
    with pytest.raises(SchemaTooNew, match="99"):
        there(again(team))
    with pytest.raises(SchemaTooNew):
        push(store, f"file://{team}")
    (team / "format.json").write_bytes(b"?")
    with pytest.raises(Corrupted):
        there(again(team))


# ---- numbers


class Late(FolderRemote):
    """Lists the newest `hidden` numbers of a collection not yet, as caches of file systems do."""

    hidden = 1

    def _listed(self, collection: str = "") -> list[str]:
        names = super()._listed(collection)
        numbers = sorted(
            (name for name in names if name.endswith(".json")),
            key=lambda name: int(name.rpartition("/")[2].partition(".")[0]),
        )
        return [name for name in names if name not in numbers[-self.hidden :]]


@pytest.mark.parametrize("hidden", [1, 2, 5])
def test_numbers_that_are_listed_late_are_not_passed_by(
    team: Path, tmp_path: Path, hidden: int
) -> None:
    for seed in range(5):
        Late.hidden = hidden
        late = Late(f"file://{team}")
        assert late.put(draft(tmp_path, seed=seed)).version == seed + 1
        for before in range(seed + 1):
            found = Late(f"file://{team}").put(draft(tmp_path, seed=before))
            assert found.version == before + 1
    assert [v.version for v in there(again(team))] == [1, 2, 3, 4, 5]


def test_a_deletion_that_lost_a_race_leaves_the_files(
    remote: Remote, team: Path, tmp_path: Path
) -> None:
    one = draft(tmp_path)
    version = remote.put(one)

    class Slow(FolderRemote):
        def known(self, identities: Any) -> Any:
            again(team).put(one)  # comes between the mark and the removal of the files
            return super().known(identities)

    Slow(f"file://{team}").delete(version)
    found = again(team).get(FIRST)
    assert found.version == 2
    (tmp_path / "into").mkdir()
    again(team).fetch(found, tmp_path / "into")
    assert (tmp_path / "into" / "state.pt").read_bytes() == one.state.read_bytes()


# ---- rights, space, drafts


def as_nobody(work: Callable[[], object]) -> list[str]:
    """What an error of `work` is called, done by a user without rights."""

    def act(send: Callable[[object], None]) -> None:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        try:
            send(f"{work()!r:.50}")
        except Exception as error:  # noqa: BLE001  told to the parent
            send(type(error).__name__)

    return run(act)


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    """The test's folder, that others may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o777 == 0o700:
            folder.chmod(0o755)
    return tmp_path


def test_a_folder_without_rights_is_denied_and_never_looks_empty(
    opened: Path, team: Path, remote: Remote, store: LocalStore
) -> None:
    remote.put(one := draft(opened))
    assert as_nobody(lambda: len(there(again(team)))) == ["1"]
    assert as_nobody(lambda: again(team).put(draft(opened, seed=2))) == ["PermissionError"]
    two = draft(opened, seed=2)
    assert as_nobody(lambda: again(team).put(two)) == ["PermissionDenied"]
    assert as_nobody(lambda: again(team).put(one).version) == ["1"]
    assert as_nobody(lambda: again(team).delete(there(again(team))[0])) == ["PermissionDenied"]
    (team / "index").chmod(0o700)
    assert as_nobody(lambda: len(there(again(team)))) == ["PermissionDenied"]
    assert as_nobody(lambda: again(team).get(FIRST)) == ["PermissionDenied"]
    team.chmod(0o700)
    assert as_nobody(lambda: len(there(again(team)))) == ["PermissionDenied"]
    assert [v.version for v in there(again(team))] == [1]


def test_a_full_disk_is_said_and_leaves_nothing(
    store: LocalStore, team: Path, tmp_path: Path
) -> None:
    def act(send: Callable[[object], None]) -> None:
        # A limit on the size of files acts as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            open_remote(f"file://{team}").put(big)
        except DiskFull as error:
            send(error.message.replace("\n", " "))

    big = draft(tmp_path)
    big.state.write_bytes(bytes(5000))
    (said,) = run(act)
    assert str(team) in said
    assert not any((team / "tmp").iterdir())
    assert there(again(team)) == []


def test_a_full_disk_in_a_pull_is_not_the_remote_s_fault(
    store: LocalStore, team: Path, tmp_path: Path
) -> None:
    push(store, f"file://{team}")

    def act(send: Callable[[object], None]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            mine = again(team)
            pull(back, mine, everything(mine, {}))
        except DiskFull as error:
            send(type(error).__name__)

    back = LocalStore(tmp_path / "back")
    assert run(act) == ["DiskFull"]
    assert records(back) == []


def test_drafts_of_the_dead_are_swept_after_a_day(
    remote: Remote, team: Path, tmp_path: Path
) -> None:
    remote.put(draft(tmp_path))
    for name, age_s in (("old", 90_000), ("new", 10)):
        (team / "tmp" / name).write_bytes(b"x")
        os.utime(team / "tmp" / name, (time.time() - age_s,) * 2)
    there(again(team))
    assert {path.name for path in (team / "tmp").iterdir()} == {"old", "new"}
    again(team).put(draft(tmp_path, seed=1))
    assert [path.name for path in (team / "tmp").iterdir()] == ["new"]


def test_a_file_in_the_place_of_the_folder(store: LocalStore, team: Path) -> None:
    team.write_text("not mounted")
    with pytest.raises(Unavailable):
        there(again(team))
    assert push(store, f"file://{team}", tries=1).waiting == 6
    assert len(Outbox(store.outbox_path).all(f"file://{team}", (WAITING,))) == 6
    assert team.read_text() == "not mounted"


def test_urls(tmp_path: Path) -> None:
    for url in ("team", "/mnt/team", "file://", "://x", "s3:/bucket", ""):
        with pytest.raises(UsageError):
            open_remote(url)
    with pytest.raises(UsageError):
        open_remote("nosuchsystem://x/y")
    with pytest.raises(EnvironmentLacks, match="gs://") as caught:
        open_remote("gs://bucket/x")
    assert "gcsfs" in caught.value.hint
    assert open_remote(f"file://{tmp_path}/").url == f"file://{tmp_path}"


# ---- processes


def test_open_files_do_not_pile_up(store: LocalStore, team: Path, tmp_path: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    push(store, f"file://{team}")
    pulled(again(team), tmp_path / "back0").close()
    before = count()
    for number in range(1, 4):
        push(store, f"file://{team}")
        pulled(again(team), tmp_path / f"back{number}").close()
    assert count() <= before


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory):
    with at_s3(tmp_path_factory.mktemp("s3")) as spot:
        yield spot


def test_an_object_store_works_on_in_a_fork(s3: Spot, tmp_path: Path) -> None:
    mine = s3.open(s3.fresh())
    mine.put(draft(tmp_path))
    child = Child(lambda send: send(mine.put(draft(tmp_path, seed=1)).version))
    assert child.wait() == (0, ["2"])
    assert mine.put(draft(tmp_path, seed=2)).version == 3


def test_a_bucket_that_is_not_there(s3: Spot, store: LocalStore) -> None:
    s3.fresh()
    with pytest.raises(NotFound):
        push(store, "s3://no-such-bucket/modules", tries=1)
    assert len(Outbox(store.outbox_path).all("s3://no-such-bucket/modules", (WAITING,))) == 6


def test_no_credentials_are_final(s3: Spot, store: LocalStore, monkeypatch) -> None:
    url = s3.fresh()
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(PermissionDenied) as caught:
        push(store, url)
    assert "credentials" in caught.value.hint
    S3FileSystem.clear_instance_cache()


def test_a_store_that_ignores_conditions_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    plain = MemoryFileSystem.pipe_file
    careful = open_remote(f"memory://{tmp_path.name}-careful")
    careful.put(draft(tmp_path))
    assert "exclusive" in careful.capabilities

    def overwrite(self, path, value, mode="overwrite", **how):
        return plain(self, path, value, mode="overwrite", **how)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", overwrite)
    remote = open_remote(f"memory://{tmp_path.name}-careless")
    with pytest.warns(UserWarning, match="replaces what it should only make"):
        remote.put(draft(tmp_path))
    assert "exclusive" not in remote.capabilities
    assert remote.put(draft(tmp_path, seed=1)).version == 2


def test_a_newer_format_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team/format.json").write_text('{"schema": 99}')
    with pytest.raises(SchemaTooNew):
        open_remote(f"file://{tmp_path}/team").put(draft(tmp_path))
    assert "99" in (tmp_path / "team/format.json").read_text()


def test_what_a_file_system_cannot_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def cannot(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", cannot)
    with pytest.raises(UsageError, match="this file system cannot write") as caught:
        open_remote(f"memory://{tmp_path.name}").put(draft(tmp_path))
    assert caught.value.hint


def test_what_never_changes_is_read_once_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODULELENS_CACHE", str(tmp_path / "cache"))
    read: list[str] = []
    plain = Objects.read

    def noted(self: Objects, name: str) -> bytes:
        read.append(name)
        return plain(self, name)

    monkeypatch.setattr(Objects, "read", noted)
    with at_s3(tmp_path) as place:
        url = place.fresh()
        remote = place.open(url)
        for number in range(4):
            remote.put(draft(tmp_path, f"layer{number}", number, tags=("a tag",), aliases=("al",)))
        first = there(place.open(url))
        remote.alias(first[0], add=["new"], remove=["al"])
        remote.tag(first[0], add=["more"], remove=["a tag"])
        read.clear()
        assert numbered(there(place.open(url))) == numbered(first)
        again = {v.row.fqn: v.row for v in there(place.open(url))}[first[0].row.fqn]
        assert (again.aliases, again.tags) == (("new",), ("more",))
        index = [name for name in read if name.startswith("index/") and "/aliases/" not in name]
        assert len(index) == 1  # the tag that is new
        # A file that is no cache costs time only; a remote made anew has nothing of the old one.
        (cache,) = (tmp_path / "cache").rglob("seen-*.sqlite")
        cache.write_bytes(b"no table")
        assert len(there(place.open(url))) == 4
        import fsspec

        fsspec.filesystem("s3").rm(url.removeprefix("s3://"), recursive=True)
        place.open(url).put(draft(tmp_path, "layer0", "other"))
        assert [v.identity for v in there(place.open(url))] == [
            draft(tmp_path, "layer0", "other").identity
        ]
