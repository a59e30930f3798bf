"""Damaged, foreign and newer files: a named error for that entry; all others stay usable."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from tests.store.samples import add

from modulelens.errors import Corrupted, ModuleLensError, NotFound, SchemaTooNew
from modulelens.records import Metadata
from modulelens.store import LocalStore
from modulelens.store.files import digest_of


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "repo")


def folder(store: LocalStore, entry: Metadata) -> Path:
    return store.root / "entries" / entry.id


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def record(path: Path) -> bytes:
    """A record without the digest at its end: with it, any change is noticed."""
    return re.sub(rb',"digest":"[0-9a-f]{64}"}$', b"}", path.read_bytes())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    overwrite(path, bytes(data))


def others_work(store: LocalStore, good: Metadata) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="entry .* is left out of the index")
        others_are_found(store, good)


def others_are_found(store: LocalStore, good: Metadata) -> None:
    fresh = LocalStore(store.root)
    assert fresh.metadata(good.id).name == good.name
    assert torch.equal(fresh.state(good.id)["scale"], torch.arange(4.0))
    for digest in good.blobs:
        fresh.blob_bytes(digest)
    assert good.id in {row.id for row in fresh.find({"model": "dlrm"})}
    fresh.reindex()
    assert good.id in {row.id for row in fresh.find({"model": "dlrm"})}


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "same size"])
def test_a_damaged_blob_is_named(store, damage):
    good, bad = add(store, fqn="good"), add(store, blobs=(b"v" * 5000,))
    digest = next(d for d, size in bad.blobs.items() if size == 5000)
    path = store.blob_path(digest)
    assert store.blob_path(digest) == path
    data = path.read_bytes()
    changed = {
        "flip": data[:2500] + b"w" + data[2501:],
        "cut": data[:2500],
        "empty": b"",
        "longer": data + b"v",
        "same size": b"x" * 5000,
    }[damage]
    overwrite(path, changed)
    with pytest.raises(Corrupted, match=digest[:16]):
        store.blob_path(digest)
    assert store.blob_path(digest, verify=False) == path
    report = store.fsck()
    assert {(p.subject, p.code) for p in report.problems} == {(digest, "CORRUPTED")}
    others_work(store, good)


def test_fsck_names_the_entries_that_need_a_damaged_blob(store):
    shared = b"s" * 5000
    one, two = add(store, fqn="one", blobs=(shared,)), add(store, fqn="two", blobs=(shared,))
    add(store, fqn="other")
    digest = next(d for d, size in one.blobs.items() if size == 5000)
    overwrite(store.blob_path(digest), b"t" * 5000)
    (problem,) = store.fsck().problems
    assert problem.subject == digest
    assert set(problem.entries) == {f"{entry.name}@v1" for entry in (one, two)}


def test_every_flipped_bit_of_a_record_is_noticed(store):
    good, bad = add(store, fqn="good"), add(store)
    path = folder(store, bad) / "metadata.json"
    data, whole = path.read_bytes(), store.metadata(bad.id)
    for at in range(0, len(data), 7):
        flip(path, at)
        try:
            assert store.metadata(bad.id) == whole  # only where the seal itself is no seal any more
            assert at > len(data) - 80
        except Corrupted:
            pass
        path.write_bytes(data)
    flip(path, data.find(next(iter(bad.blobs)).encode()))
    assert store.gc().removed_blobs == 0  # else a flipped digest would cost the blob it named
    others_work(store, good)


def test_the_index_says_what_it_leaves_out(store):
    good, bad = add(store, fqn="good"), add(store)
    (folder(store, bad) / "metadata.json").write_text("{")
    with pytest.warns(UserWarning, match=f"entry {bad.id} is left out of the index: .*cannot be"):
        assert store.reindex() == 1
    assert [row.id for row in store.find()] == [good.id]


def test_a_missing_blob_is_named(store):
    good, bad = add(store, fqn="good"), add(store, blobs=(b"v" * 5000,))
    digest = next(d for d, size in bad.blobs.items() if size == 5000)
    store.blob_path(digest).unlink()
    with pytest.raises(NotFound, match=digest):
        store.blob_bytes(digest)
    (problem,) = store.fsck().problems
    assert (problem.subject, problem.code) == (digest, "NOT_FOUND")
    others_work(store, good)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_state_is_named(store, damage):
    good, bad = add(store, fqn="good"), add(store)
    path = folder(store, bad) / "state.pt"
    if damage == "flip":
        flip(path, path.read_bytes().find(torch.arange(4.0).numpy().tobytes()) + 5)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:300])
    else:
        path.unlink()
    with pytest.raises((Corrupted, NotFound), match=r"state\.pt"):
        store.state(bad.id)
    (problem,) = store.fsck().problems
    assert problem.subject == bad.id
    others_work(store, good)


def swap_state(store: LocalStore, entry: Metadata, data: bytes) -> None:
    """What an attacker does: another state.pt, and the digest to go with it."""
    (folder(store, entry) / "state.pt").write_bytes(data)
    path = folder(store, entry) / "metadata.json"
    path.write_bytes(record(path).replace(entry.state_digest.encode(), digest_of(data).encode()))


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (open, (str(self.canary), "w"))


def test_a_pickle_is_never_run(store, tmp_path):
    canary = tmp_path / "canary"
    good, bad = add(store, fqn="good"), add(store)
    buffer = io.BytesIO()
    torch.save({"x": Bomb(canary)}, buffer)
    for data in (buffer.getvalue(), pickle.dumps(Bomb(canary))):
        swap_state(store, bad, data)
        bad = store.metadata(bad.id)
        with pytest.raises(Corrupted, match=bad.id):
            store.state(bad.id)
        store.fsck()
    assert not canary.exists()
    others_work(store, good)


def test_a_state_that_would_unpack_to_more_than_the_file_is_refused(store):
    bad = add(store)
    source = zipfile.ZipFile(folder(store, bad) / "state.pt")
    buffer = io.BytesIO()
    with source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    swap_state(store, bad, buffer.getvalue())
    with pytest.raises(Corrupted, match="compressed"):
        store.state(bad.id)


@pytest.mark.parametrize(
    "value", [[torch.ones(1)], {"a": 3}, {"a": torch.nn.Parameter(torch.ones(1))}]
)
def test_a_state_of_another_form_is_refused(store, value):
    bad = add(store)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    swap_state(store, bad, buffer.getvalue())
    with pytest.raises(Corrupted, match="tensor"):
        store.state(bad.id)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda text: text[: len(text) // 2], Corrupted),
        (lambda text: b"", Corrupted),
        (lambda text: b"\xff\x00garbage", Corrupted),
        (lambda text: b"[" * 100_000, Corrupted),
        (lambda text: b"{}", Corrupted),
        (lambda text: text.replace(b'"params":1000', b'"params":"many"'), Corrupted),
        (lambda text: text.replace(b'"model":"dlrm"', b'"model":"other"'), Corrupted),
        (lambda text: text.replace(b'"version":1', b'"version":2'), Corrupted),
        (lambda text: json.dumps(json.loads(text) | {"schema": 99}).encode(), SchemaTooNew),
        (lambda text: json.dumps(json.loads(text) | {"schema": 0}).encode(), Corrupted),
    ],
)
def test_a_damaged_record_is_named(store, change, error):
    good, bad = add(store, fqn="good"), add(store)
    path = folder(store, bad) / "metadata.json"
    path.write_bytes(change(record(path)))
    with pytest.raises(error) as caught:
        store.metadata(bad.id)
    assert bad.id in str(caught.value)
    (problem,) = store.fsck().problems
    assert (problem.subject, problem.code) == (bad.id, caught.value.code)
    others_work(store, good)
    assert store.blob_path(next(iter(bad.blobs)))
    store.remove(bad.id)
    assert store.fsck().ok


@pytest.mark.parametrize(
    "structure", [{"$tensor": 3}, {"$tensor": {"spec": {"dtype": 1}}}, {"$tensor": None}]
)
def test_a_record_with_a_malformed_tensor_hides_no_other(store, structure):
    good, bad = add(store, fqn="good"), add(store)
    path = folder(store, bad) / "metadata.json"
    raw = json.loads(path.read_bytes())
    raw["calls"][0]["args"] = structure
    path.write_text(json.dumps(raw))
    others_work(store, good)


def test_numbers_beyond_64_bits_hide_no_other(store):
    good, bad = add(store, fqn="good"), add(store)
    path = folder(store, bad) / "metadata.json"
    path.write_bytes(record(path).replace(b'"params":1000', b'"params":' + b"9" * 19))
    others_work(store, good)


def test_gc_removes_no_blob_while_a_record_cannot_be_read(store):
    bad = add(store)
    path = folder(store, bad) / "metadata.json"
    text = path.read_bytes()
    path.write_bytes(text[:100])
    (store.root / "tmp" / "leftover").write_bytes(b"12345")
    report = store.gc()
    assert report.unreadable == (bad.id,)
    assert (report.removed_blobs, report.freed_bytes, report.removed_leftovers) == (0, 5, 1)
    path.write_bytes(text)
    assert store.fsck().ok


@pytest.mark.parametrize("part", ["collection", "version", "metadata.json", "state.pt", "blob"])
def test_links_are_refused(store, tmp_path, part):
    good, bad = add(store, fqn="good", blobs=()), add(store)
    path = {
        "collection": folder(store, bad).parent,
        "version": folder(store, bad),
        "metadata.json": folder(store, bad) / "metadata.json",
        "state.pt": folder(store, bad) / "state.pt",
        "blob": store.blob_path(max(bad.blobs, key=bad.blobs.__getitem__)),
    }[part]
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    fresh = LocalStore(store.root)
    with pytest.raises(ModuleLensError):
        fresh.state(bad.id)
        fresh.blob_path(path.name)
    others_work(store, good)
    if part != "collection":
        assert not fresh.fsck().ok
    fresh.gc()
    assert elsewhere.exists()


def test_damaged_aliases_hide_nothing(store):
    entry = add(store, aliases=("baseline",))
    path = folder(store, entry).parent / "aliases.json"
    path.write_text('{"aliases": {"baseline": 1')
    with pytest.raises(Corrupted, match=r"aliases\.json"):
        store.resolve("dlrm/over_arch@baseline")
    assert store.resolve("dlrm/over_arch") == entry.id
    (problem,) = store.fsck().problems
    assert (problem.subject, problem.code) == (entry.collection, "CORRUPTED")
    path.write_text('{"aliases": {"baseline": 9}}')
    with pytest.raises(NotFound):
        store.resolve("dlrm/over_arch@baseline")
    assert [problem.code for problem in store.fsck().problems] == ["DANGLING_ALIAS"]
    others_work(store, entry)


def test_a_wrong_size_in_a_record_is_named(store):
    bad = add(store, blobs=(b"v" * 5000,))
    path = folder(store, bad) / "metadata.json"
    path.write_bytes(record(path).replace(b":5000", b":9999"))
    (problem,) = store.fsck().problems
    assert (problem.subject, problem.code) == (bad.id, "CORRUPTED")
    assert "9,999" in problem.message


def test_fsck_reads_again_what_was_verified_before(store):
    add(store, blobs=(b"v" * 5000,))
    sizes: list[int] = []
    assert store.fsck(progress=sizes.append).ok
    assert sum(sizes) > 5000
    report = store.fsck()
    assert (report.entries, report.blobs) == (1, 2)


def index_files(store: LocalStore) -> list[Path]:
    return list(store.root.glob("index.sqlite*"))


@pytest.mark.parametrize("damage", ["gone", "garbage", "cut", "empty", "other version", "holes"])
def test_a_damaged_index_is_rebuilt_by_itself(store, damage):
    for number in range(60):
        add(store, fqn=str(number), aliases=("a",))
    before = store.find()
    store.close()
    path = store.root / "index.sqlite"
    data = path.read_bytes()
    assert index_files(store) == [path]
    if damage == "gone":
        path.unlink()
    elif damage == "other version":
        path.write_bytes(data[:60] + b"\0\0\0\x63" + data[64:])
    else:
        path.write_bytes(
            {
                "garbage": b"not a database" * 1000,
                "cut": data[: len(data) // 2],
                "empty": b"",
                "holes": data[:4096] + b"\xa5" * (len(data) - 4096),
            }[damage]
        )
    fresh = LocalStore(store.root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damage behind the first page is found while searching
        assert fresh.find() == before
        assert fresh.count({"aliases": "a"}) == 60
    assert fresh.fsck().ok
    assert store.find() == before


def test_an_index_deleted_while_open_loses_nothing(store):
    other = LocalStore(store.root)
    first = add(store)
    assert other.count() == 1
    for path in index_files(store):
        path.unlink()
    second = add(other, fqn="second")
    third = add(store, fqn="third")
    assert {row.id for row in store.find()} == {first.id, second.id, third.id}
    assert {row.id for row in other.find()} == {first.id, second.id, third.id}


def test_fsck_names_what_search_does_not_know(store):
    first, second = add(store), add(store, fqn="second")
    copy = folder(store, first).with_name("7")
    shutil.copytree(folder(store, first), copy)
    path = copy / "metadata.json"
    path.write_bytes(record(path).replace(b'"version":1', b'"version":7'))
    assert [problem.code for problem in store.fsck().problems] == ["NOT_INDEXED"]
    assert store.reindex() == 3
    assert store.fsck().ok
    assert store.count({"fqn": second.fqn}) == 1
