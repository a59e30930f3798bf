"""gc, full disks, folders that cannot be written, order and paging of search."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch
from tests.store.samples import add, files, metadata, put_entry, run

from modulelens.errors import DiskFull, EnvironmentLacks
from modulelens.store import LocalStore
from modulelens.store.files import space_for
from modulelens.store.filesystem import is_local


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "repo")


def test_gc_frees_what_no_entry_needs(store):
    keep = add(store, blobs=(b"shared" * 100, b"kept" * 100))
    drop = add(store, blobs=(b"shared" * 100, b"dropped" * 100))
    (store.root / "tmp" / "leftover").write_bytes(b"12345")
    unfinished = store.root / "entries" / keep.collection / "9"
    unfinished.mkdir()
    (unfinished / "state.pt").write_bytes(b"123")
    assert store.count() == 2
    store.remove(drop.id)
    assert [row.id for row in store.find()] == [keep.id]
    report = store.gc()
    assert report.removed_blobs == 1
    assert report.freed_bytes == 700 + 5 + 3
    assert report.removed_leftovers == 2
    for digest in keep.blobs:
        store.blob_bytes(digest)
    assert store.gc() == type(report)()
    assert store.fsck().ok
    foreign = store.root / "blobs" / "ab"
    foreign.mkdir(exist_ok=True)
    (foreign / ".nfs0001").write_bytes(b"")
    assert store.gc().removed_blobs == 0


def test_search_orders_by_natural_name_and_pages(store):
    for fqn in ("layers.10", "layers.2", "", "layers.2.mlp"):
        add(store, fqn=fqn)
    newest = add(store, fqn="layers.2")
    names = [(row.fqn, row.version) for row in store.find()]
    assert names == [
        ("", 1),
        ("layers.2", 2),
        ("layers.2", 1),
        ("layers.2.mlp", 1),
        ("layers.10", 1),
    ]
    assert [(r.fqn, r.version) for r in store.find(limit=2, offset=1)] == names[1:3]
    assert store.find(limit=0) == []
    assert store.count() == 5
    assert store.find({"fqn": "layers.2"})[0].id == newest.id
    before = store.find()
    store.reindex()
    assert store.find() == before


def test_a_row_holds_the_facts(store):
    entry = add(store, tags=("a", "b"), aliases=("base",))
    (row,) = store.find({"cls": "MLP"})
    assert row.id == entry.id
    assert row.input_dtype == ("bfloat16",)
    assert row.input_shape == ("2x64",)
    assert row.output_shape == ("2x8",)
    assert row.dtypes == ("bfloat16", "float32")
    assert (row.device, row.torch, row.git_commit, row.calls) == ("cpu", "2.13.0", "abc", 1)
    assert (row.tags, row.aliases, row.date) == (("a", "b"), ("base",), entry.created)


def fill(root: Path, what: str, entry_id: str, limit: int, send) -> None:
    store = LocalStore(root)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        if what == "blob":
            store.put_blobs([b"small", os.urandom(3_000_000)])
        elif what == "state":
            put_entry(store, metadata(fqn="full"), {"x": torch.zeros(100_000)})
        elif what == "record":
            put_entry(store, metadata(fqn="full", warnings=("w" * 2_000_000,)), {})
        else:
            big = ("t" * 2_000_000,)
            store.update(entry_id, lambda old: msgspec.structs.replace(old, tags=big))
    except DiskFull as error:
        send(error)


@pytest.mark.parametrize("what", ["blob", "state", "record", "update"])
def test_a_full_disk_is_named_and_leaves_nothing(store, what):
    entry = add(store)
    store.close()
    before = files(store.root)
    out = "".join(run(lambda send: fill(store.root, what, entry.id, 150_000, send)))
    assert f"no space left on {store.root}" in out
    assert "bytes needed" in out
    assert {"blob": "2 blobs", "update": "dlrm/over_arch"}.get(what, "dlrm/full") in out
    after = files(store.root)
    assert not {name for name in after if name not in before and "blobs/" not in name}
    assert {name: after[name] for name in before} == before
    assert [row.id for row in store.find()] == [entry.id]
    assert store.fsck().ok
    store.gc()
    assert files(store.root).keys() == before.keys()


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 2 MB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if not mount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("what", ["blob", "state", "record"])
def test_a_really_full_disk(small_disk, what):
    store = LocalStore(small_disk / "repo")
    entry = add(store)
    store.close()
    # Without the last part there would be room for the index's log, and for nothing else.
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
    out = "".join(run(lambda send: fill(store.root, what, entry.id, 0, send)))
    assert "no space left on" in out
    assert [row.id for row in LocalStore(store.root).find()] == [entry.id]
    filler.unlink()
    assert add(LocalStore(store.root), fqn="later").version == 1
    assert LocalStore(store.root).fsck().ok


def test_an_entry_whose_row_finds_no_space_is_stored_and_indexed_later(store):
    add(store)
    store.close()

    def work(send):
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        with pytest.warns(UserWarning, match="catch up"):
            send(add(LocalStore(store.root), fqn="late").id)

    (entry_id,) = run(work)
    assert store.find({"fqn": "late"})[0].id == entry_id
    assert not any((store.root / "changes").iterdir())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_quota_and_size_limits_count_as_full(tmp_path, error):
    message = "entry x not stored, 1,000 bytes"
    with pytest.raises(DiskFull, match=message), space_for("entry x", tmp_path, 1000):
        raise OSError(error, "no")
    with pytest.raises(OSError, match="other"), space_for("entry x", tmp_path, 1000):
        raise OSError(errno.EIO, "other")


def read_only(root: Path, send) -> None:
    # Even root is held by permissions once its capabilities are gone.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
    store = LocalStore(root)
    assert not store.writable
    rows = store.find({"model": "dlrm"})
    for row in rows:
        assert store.resolve(row.name) == row.id
        assert store.state(row.id)["scale"].sum() == 6
        for digest in store.metadata(row.id).blobs:
            store.blob_bytes(digest)
    assert store.fsck().ok
    for use in (lambda: add(store), lambda: store.remove(rows[0].id), store.gc, store.reindex):
        with pytest.raises(EnvironmentLacks):
            use()
    send(f"{len(rows)} {store.count()}")


@pytest.mark.parametrize("index", ["fresh", "gone", "behind", "log"])
def test_a_folder_that_cannot_be_written_can_be_read(store, index):
    entries = [add(store, fqn=str(number)) for number in range(3)]
    if index != "log":
        store.close()
    if index == "gone":
        (store.root / "index.sqlite").unlink()
    if index == "behind":
        (store.root / "index.sqlite").write_bytes(b"")
        LocalStore(store.root).count()
        (store.root / "changes" / "x").write_text(entries[0].collection)
    everything = [store.root, *store.root.rglob("*")]
    folders = [path for path in everything if path.is_dir()]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert run(lambda send: read_only(store.root, send)) == ["3 3"]
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_network_file_systems_are_known(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:20 / / rw - ext4 /dev/root rw\n"
        "23 22 0:21 / /home\\040dir rw shared:1 - nfs4 server:/x rw\n"
        "24 22 0:22 / /mnt/s3 rw - fuse.s3fs s3fs rw\n"
        "25 22 0:23 / /over rw - ext4 /dev/x rw\n"
        "26 25 0:24 / /over rw - cifs //server/x rw\n"
    )
    assert is_local(Path("/var/repo"), mounts)
    assert is_local(Path("/home"), mounts)
    for folder in ("/home dir/repo", "/mnt/s3/a/b", "/over"):
        assert not is_local(Path(folder), mounts)
    assert not is_local(Path("/var"), tmp_path / "none")
    assert issubclass(DiskFull, EnvironmentLacks)
