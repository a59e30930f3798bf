"""The store through its public face: what goes in comes out."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from tests.store.samples import add, files, metadata, put_entry

import modulelens
from modulelens.errors import Conflict, NotARepo, NotFound, SchemaTooNew, UsageError
from modulelens.records import Grade, GradeLevel, Measurement, collection_id
from modulelens.store import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "repo")


def test_blobs_come_back_in_order_and_equal_ones_are_written_once(store):
    big = bytes(range(256)) * 4096
    buffers = [b"", b"a", big, b"a", memoryview(torch.arange(5.0).numpy()), bytearray(big)]
    seen: list[int] = []
    digests = store.put_blobs(buffers, progress=seen.append)
    assert digests[1] == digests[3]
    assert digests[2] == digests[5]
    assert [store.blob_bytes(d) for d in digests] == [bytes(b) for b in buffers]
    assert sorted(seen) == sorted(memoryview(b).nbytes for b in buffers)
    paths = [path for path in (store.root / "blobs").rglob("*") if path.is_file()]
    assert len(paths) == 4
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in paths)
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert store.put_blobs(buffers) == digests
    assert {path: path.stat().st_mtime_ns for path in paths} == before
    assert not any((store.root / "tmp").iterdir())


def test_a_blob_cut_off_by_a_power_cut_is_written_again(store):
    (digest,) = store.put_blobs([b"x" * 100])
    path = store.blob_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"")
    assert store.put_blobs([b"x" * 100]) == [digest]
    assert store.blob_bytes(digest) == b"x" * 100


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "/etc/passwd", "A" * 64, "a" * 64])
def test_a_digest_that_is_none_never_becomes_a_path(store, digest):
    with pytest.raises(NotFound):
        store.blob_path(digest)


def test_an_entry_comes_back(store):
    stored = add(store, tags=("t",), aliases=("baseline",))
    assert stored.version == 1
    assert stored.created.endswith("Z")
    assert store.metadata(stored.id).blobs == stored.blobs
    assert store.metadata(stored.id).tags == ("t",)
    state = store.state(stored.id)
    assert torch.equal(state["scale"], torch.arange(4.0))
    state["scale"] += 1
    assert torch.equal(store.state(stored.id, ["scale"])["scale"], torch.arange(4.0))
    with pytest.raises(NotFound, match="nothing"):
        store.state(stored.id, ["nothing"])
    path = store.root / "entries" / stored.id / "state.pt"
    assert torch.load(path, weights_only=True, mmap=True).keys() == {"scale"}


def test_state_is_written_also_when_empty_and_holds_only_plain_tensors(store):
    stored = put_entry(store, metadata(), {})
    assert store.state(stored.id) == {}
    with pytest.raises(UsageError, match="Parameter"):
        put_entry(store, metadata(), {"w": torch.nn.Parameter(torch.ones(1))})
    shared = torch.arange(6.0)
    stored = put_entry(store, metadata(), {"a": shared, "b": shared[2:]})
    state = store.state(stored.id)
    assert state["a"].data_ptr() + 8 == state["b"].data_ptr()


def test_an_entry_needs_its_blobs(store):
    with pytest.raises(Conflict, match="not there"):
        put_entry(store, metadata(blobs={"a" * 64: 3}), {})
    (digest,) = store.put_blobs([b"abc"])
    with pytest.raises(Conflict, match="with 4 bytes"):
        put_entry(store, metadata(blobs={digest: 4}), {})
    assert store.count() == 0
    assert not any((store.root / "entries").rglob("metadata.json"))


def test_versions_count_up_and_never_come_back(store):
    ids = [add(store).id for _ in range(3)]
    assert [entry_id.split("/")[1] for entry_id in ids] == ["1", "2", "3"]
    store.remove(ids[2])
    assert add(store).version == 4
    collection = ids[0].split("/")[0]
    assert store.versions(collection) == [4, 2, 1]


def test_updates_rewrite_the_record(store):
    stored = add(store)
    grade = Grade(level=GradeLevel.CLOSE, strategy="init")
    store.update(stored.id, lambda m: msgspec.structs.replace(m, grade=grade))
    store.update(stored.id, lambda m: msgspec.structs.replace(m, tags=("fast",)))
    times = Measurement(label="forward", times_s=(2.0, 3.0, 4.0))
    store.update(stored.id, lambda m: msgspec.structs.replace(m, measurement=times))
    found = store.find({"grade": "close", "tags": "fast", "latency_s": {"$lt": 3.5}})
    assert [row.id for row in found] == [stored.id]
    assert store.metadata(stored.id).grade == grade
    with pytest.raises(NotFound):
        store.update(f"{stored.collection}/7", lambda m: m)


def test_aliases_move_and_protect(store):
    first, second = add(store, aliases=("baseline", "first")), add(store)
    assert store.aliases(first.collection) == {"baseline": 1, "first": 1}
    store.alias(second.id, "baseline")
    assert store.resolve("dlrm/over_arch@baseline") == second.id
    assert {row.id: row.aliases for row in store.find()} == {
        first.id: ("first",),
        second.id: ("baseline",),
    }
    with pytest.raises(Conflict, match="baseline"):
        store.remove(second.id)
    store.remove(second.id, force=True)
    assert store.aliases(first.collection) == {"first": 1}
    for alias in ("", "v2", "7", "a@b"):
        with pytest.raises(UsageError):
            store.alias(first.id, alias)
    with pytest.raises(NotFound):
        store.alias(second.id, "gone")


def test_references_resolve(store):
    add(store)
    newest, root = add(store), add(store, fqn="")
    at = add(store, fqn="odd@name")
    slash = add(store, model="org/model", fqn="layer")
    slash_root = add(store, model="org/model", fqn="")
    for ref, entry in {
        "dlrm/over_arch": newest,
        "dlrm/over_arch@v2": newest,
        "dlrm/over_arch@2": newest,
        newest.id: newest,
        newest.collection: newest,
        f"{newest.collection}@v2": newest,
        "dlrm": root,
        "dlrm@v1": root,
        "dlrm/odd@name": at,
        "dlrm/odd@name@v1": at,
        "org/model/layer": slash,
        "org/model": slash_root,
    }.items():
        assert store.resolve(ref) == entry.id, ref
    with pytest.raises(NotFound) as caught:
        store.resolve("dlrm/over_arhc")
    assert caught.value.did_you_mean == ("dlrm/over_arch",)
    with pytest.raises(NotFound) as caught:
        store.resolve("over_arch")
    assert "dlrm/over_arch" in caught.value.did_you_mean
    store.alias(newest.id, "baseline")
    with pytest.raises(NotFound) as caught:
        store.resolve("dlrm/over_arch@basline")
    assert caught.value.did_you_mean == ("baseline",)
    for ref in ("dlrm/over_arch@v3", f"{newest.collection}/3", "", "@", "/", "../..", "a" * 5000):
        with pytest.raises(NotFound):
            store.resolve(ref)


@pytest.mark.parametrize("entry_id", ["", "x", "../../etc/1", f"{'a' * 32}/0", f"{'a' * 32}/../1"])
def test_an_id_that_is_none_never_becomes_a_path(store, entry_id):
    for use in (store.metadata, store.state, store.remove, lambda i: store.alias(i, "x")):
        with pytest.raises(NotFound):
            use(entry_id)


HOSTILE = [
    "../../x",
    "/etc/evil",
    "a\0b",
    "n" * 5000,
    "\N{PILE OF POO}" * 300,
    "Conv",
    "conv",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "e\N{COMBINING ACUTE ACCENT}",
    "$(reboot)\n\x1b[31m",
    "NUL",
    ".",
    "'; DROP TABLE entries; --",
]


def test_hostile_names_only_ever_become_md5_folders(store, tmp_path):
    outside = sorted(tmp_path.parent.iterdir())
    stored = {name: add(store, fqn=name) for name in HOSTILE}
    stored |= {f"{name} as model": add(store, model=name) for name in HOSTILE}
    folders = {path.name for path in (store.root / "entries").iterdir()}
    assert folders == {entry.collection for entry in stored.values()}
    assert len(folders) == len(stored)
    assert all(len(name) == 32 for name in folders)
    assert sorted(tmp_path.parent.iterdir()) == outside
    for name in HOSTILE:
        entry = stored[name]
        assert store.resolve(f"dlrm/{name}") == entry.id
        assert [row.fqn for row in store.find({"fqn": name})] == [name]
        assert store.metadata(entry.id).fqn == name
        assert entry.collection == collection_id("dlrm", name)
    assert store.fsck().ok
    assert store.reindex() == len(stored)
    assert {row.fqn for row in store.find({"model": "dlrm"})} == set(HOSTILE)


def test_what_is_no_repo_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(NotARepo, match="is a file"):
        LocalStore(file)
    with pytest.raises(NotARepo, match="file"):
        LocalStore(tmp_path)
    assert file.read_text() == "x"
    with pytest.raises(NotFound, match="no repo"):
        LocalStore(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    LocalStore(empty)
    assert LocalStore(empty, create=False).count() == 0
    (empty / "format.json").write_text('{"schema": 99}')
    with pytest.raises(SchemaTooNew, match="99"):
        LocalStore(empty)


def test_a_copy_without_empty_folders_is_a_repo(store, tmp_path):
    entry = add(store)
    copy = tmp_path / "copy"
    for name, data in files(store.root).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    other = LocalStore(copy)
    assert [row.id for row in other.find()] == [entry.id]
    assert add(other).version == 2


def test_opening_reading_and_searching_import_no_torch(store):
    entry = add(store)
    code = (
        "import sys; from pathlib import Path; from modulelens.store import LocalStore\n"
        f"store = LocalStore(Path({str(store.root)!r}))\n"
        f"store.metadata(store.resolve({entry.name!r}))\n"
        "assert 'sqlite3' not in sys.modules\n"
        "assert store.count({'cls': 'MLP'}) == 1\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    source = Path(modulelens.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, check=True)
