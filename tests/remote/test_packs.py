"""Packs, and what a pull makes of a remote that lies: a named error, and nothing in the repo."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.remote.conftest import Between, contents, push, records
from tests.store.samples import metadata

import modulelens as ml
from modulelens.errors import Corrupted, NotFound, SchemaTooNew
from modulelens.store import LocalStore
from modulelens.store.files import digest_of
from modulelens.store.remote import Pack, Remote, Version, open_remote, packs
from modulelens.store.remote.pull import everything, pull

MEGABYTE = 1 << 20


def blob(number: int) -> str:
    return digest_of(str(number).encode())


@given(
    needs=st.lists(st.sets(st.integers(0, 12), max_size=8), max_size=6),
    sizes=st.lists(st.sampled_from([0, 1, 3, 40, 5 * MEGABYTE]), min_size=13, max_size=13),
)
def test_a_pack_holds_what_the_same_entries_need(needs: list[set[int]], sizes: list[int]) -> None:
    entries = [metadata(blobs={blob(n): sizes[n] for n in sorted(need)}) for need in needs]
    plan = packs.plan(entries, most_bytes=50)
    assert plan == packs.plan(entries, most_bytes=50)
    planned = [digest for group in plan for digest in group]
    assert sorted(planned) == sorted({digest for entry in entries for digest in entry.blobs})
    for group in plan:
        users = [
            {n for n, entry in enumerate(entries) if digest in entry.blobs} for digest in group
        ]
        assert all(user == users[0] for user in users)
        assert len(group) == 1 or sum(group.values()) <= 50


def test_a_large_blob_is_alone_and_so_has_the_same_name_in_every_capture() -> None:
    weight = {blob(1): 8 * MEGABYTE}
    first = packs.plan([metadata(blobs=weight | {blob(2): 10, blob(3): 20})])
    later = packs.plan([metadata(blobs={blob(4): 10} | weight), metadata(blobs=weight)])
    assert weight in first
    assert weight in later
    assert {blob(2): 10, blob(3): 20} in first


def test_thousands_of_blobs_are_planned_at_once() -> None:
    entries = [metadata(blobs={blob(n): 1 for n in range(k, k + 20)}) for k in range(0, 20_000, 20)]
    plan = packs.plan(entries)
    assert len(plan) == len(entries)
    assert [len(bundle) for bundle in packs.bundles(plan, 200)] == [10] * 100
    assert list(packs.bundles([{"a": 300}, {"b": 1}], 200)) == [[{"a": 300}], [{"b": 1}]]


@pytest.fixture
def pack(tmp_path: Path) -> tuple[Path, Pack, list[bytes]]:
    data = [b"", b"one" * 1000, b"two", bytes(5)]
    sources = {digest_of(part): tmp_path / f"blob{n}" for n, part in enumerate(data)}
    for path, part in zip(sources.values(), data, strict=True):
        path.write_bytes(part)
    (tmp_path / "spool").mkdir()
    sizes = {digest: path.stat().st_size for digest, path in sources.items()}
    path, pack = packs.write(sizes, sources.__getitem__, tmp_path / "spool")
    assert [p.name for p in (tmp_path / "spool").iterdir()] == [pack.name]
    return path, pack, data


def test_a_pack_gives_back_its_blobs(pack: tuple[Path, Pack, list[bytes]], tmp_path: Path) -> None:
    path, written, data = pack
    assert digest_of(path.read_bytes()) == written.name
    assert [bytes(view) for view in packs.blobs_in(path, written)] == data
    for number, part in enumerate(data):
        (tmp_path / f"alone{number}").mkdir()
        alone, single = packs.write(
            {digest_of(part): len(part)},
            lambda _, n=number: tmp_path / f"blob{n}",
            tmp_path / f"alone{number}",
        )
        assert single.name == digest_of(part)
        assert [bytes(view) for view in packs.blobs_in(alone, single)] == [part]


def test_what_is_no_pack_is_refused(pack: tuple[Path, Pack, list[bytes]]) -> None:
    path, written, _ = pack
    data = path.read_bytes()
    swapped = dict(reversed(written.blobs.items()))
    shifted = {
        d: s + (1 if n == 1 else -1 if n == 2 else 0)
        for n, (d, s) in enumerate(written.blobs.items())
    }
    for wrong in (swapped, shifted):
        with pytest.raises(Corrupted):
            list(packs.blobs_in(path, Pack(written.name, wrong)))
    for bad in (data[:-1], data + b"x", b"x" + data[1:], b""):
        path.write_bytes(bad)
        with pytest.raises(Corrupted):
            list(packs.blobs_in(path, written))
    path.unlink()
    with pytest.raises(Corrupted):
        list(packs.blobs_in(path, written))


# ---- a pull from a remote that lies


@pytest.fixture(scope="module")
def honest(captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A remote with all of the sample; never changed."""
    folder = tmp_path_factory.mktemp("honest")
    shutil.copytree(captured, folder / "repo")
    url = f"file://{folder}/team"
    push(LocalStore(folder / "repo"), url)
    remote = open_remote(url)
    yield remote
    remote.close()


class Lying(Between):
    """Changes the files of each version, and each pack, before the puller sees them."""

    def __init__(self, remote: Remote, change: Callable[[Path], None], name: str = "") -> None:
        super().__init__(remote)
        self.change, self.name = change, name

    def fetch(self, version: Version, into: Path) -> None:
        self.remote.fetch(version, into)
        if self.name:
            self.change(into / self.name)

    def fetch_packs(self, packs, into: Path, *, progress) -> None:
        self.remote.fetch_packs(packs, into, progress=progress)
        if not self.name:
            self.change(into / packs[-1].name)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("name", ["metadata.json", "state.pt", "packs.json", ""])
@pytest.mark.parametrize("change", [flip, cut, remove, link])
def test_damage_on_the_way_is_named_and_a_later_pull_is_whole(
    honest: Remote, captured: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    back = LocalStore(tmp_path / "back")
    with pytest.raises((Corrupted, NotFound)) as caught:
        pull(back, Lying(honest, change, name), everything(honest, {}))
    assert "/etc" not in str(caught.value)
    # What came whole before the damage may stay, and is what was pushed.
    whole = contents(LocalStore(captured))
    assert contents(back).items() < whole.items()
    for path in (back.root / "blobs").glob("*/*"):
        assert digest_of(path.read_bytes()) == path.name
    back.gc()
    needed = {digest for record in records(back) for digest in record.blobs}
    assert {path.name for path in (back.root / "blobs").glob("*/*")} == needed
    assert not any((back.root / "tmp").iterdir())
    pull(back, honest, everything(honest, {}))
    assert contents(back) == contents(LocalStore(captured))
    assert ml.Repo(back.root).fsck().ok


def edited(change: Callable[[list], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        found = json.loads(path.read_bytes())
        changed = change(found)
        path.write_bytes(json.dumps(found if changed is None else changed).encode())

    return edit


def resized(found: list) -> None:
    for pack in found:
        pack["blobs"] = {digest: size + 1 for digest, size in pack["blobs"].items()}


HOSTILE = {
    "a path as name": edited(lambda found: found[0].update(name="../../../etc/passwd")),
    "an absolute path": edited(lambda found: found[0].update(name="/etc/passwd")),
    "an empty name": edited(lambda found: found[0].update(name="")),
    "a path as blob": edited(lambda found: found[0]["blobs"].update({"../x": 1})),
    "other sizes": edited(resized),
    "negative sizes": edited(lambda found: found[0]["blobs"].update({"0" * 64: -5})),
    "an endless size": edited(lambda found: found[0]["blobs"].update({"0" * 64: 10**30})),
    "one blob in two packs": edited(lambda found: found[1]["blobs"].update(found[0]["blobs"])),
    "one pack twice": edited(lambda found: [*found, found[0]]),
    "a blob of nobody": edited(lambda found: found[0]["blobs"].update({"0" * 64: 1})),
    "a pack less": edited(lambda found: found[1:]),
    "no list": edited(lambda _: {"packs": 1}),
    "names that are numbers": edited(lambda found: found[0].update(name=5)),
    "depth": lambda path: path.write_bytes(b"[" * 100_000),
    "no JSON": lambda path: path.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_hostile_index_of_packs_ends_in_a_named_error(
    honest: Remote, tmp_path: Path, lie: str
) -> None:
    back = LocalStore(tmp_path / "back")
    with pytest.raises(Corrupted):
        pull(back, Lying(honest, HOSTILE[lie], "packs.json"), everything(honest, {})[:1])
    assert records(back) == []
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


def test_another_module_s_record_is_refused(honest: Remote, tmp_path: Path) -> None:
    one, other = everything(honest, {"fqn": "first"})[0], everything(honest, {"fqn": "second"})[0]
    swapped = msgspec.structs.replace(one, row=other.row)

    class Swapping(Between):
        def fetch(self, version: Version, into: Path) -> None:
            self.remote.fetch(one, into)

    with pytest.raises(Corrupted, match="net/first"):
        pull(LocalStore(tmp_path / "back"), Swapping(honest), [swapped])


def test_a_record_of_a_later_version_is_refused(honest: Remote, tmp_path: Path) -> None:
    honestly, newer = everything(honest, {})[0], b'{"schema":99}'

    class Newer(Between):
        def fetch(self, version: Version, into: Path) -> None:
            self.remote.fetch(honestly, into)
            (into / "metadata.json").write_bytes(newer)

    with pytest.raises(Corrupted):  # its digest is another one
        pull(LocalStore(tmp_path / "a"), Newer(honest), [honestly])
    with pytest.raises(SchemaTooNew):
        of_newer = msgspec.structs.replace(honestly, identity=digest_of(newer))
        pull(LocalStore(tmp_path / "b"), Newer(honest), [of_newer])


def test_a_good_pack_stays_out_of_the_repo_until_all_of_it_is_checked(
    honest: Remote, captured: Path, tmp_path: Path
) -> None:
    back = LocalStore(tmp_path / "back")
    good = everything(honest, {"fqn": "second"})
    pull(back, honest, good)
    kept = contents(back)
    with pytest.raises(Corrupted):
        pull(back, Lying(honest, flip), everything(honest, {}))
    assert kept.items() <= contents(back).items() < contents(LocalStore(captured)).items()
    assert ml.Repo(back.root).fsck().ok
