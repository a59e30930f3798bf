"""Forged repos of one kind each: links, pickles, sizes that lie, code in places that are read."""

from __future__ import annotations

import io
import json
import os
import pickle
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fuzz import attacks
from tests.fuzz.test_fuzz import Victim
from tests.fuzz.test_fuzz import victim as victim
from torch import nn

import modulelens as ml
from modulelens.errors import ModuleLensError, NotARepo
from modulelens.store.files import digest_of

ATTACKED = "net@v1"


def entry_of(victim: Victim, root: Path) -> Path:
    return root / "entries" / victim.ids[ATTACKED]


def change_record(entry: Path, **fields: Any) -> None:
    path = entry / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))


# ---- links and other things that are no files


def outside(room: Path) -> Path:
    folder = room / "elsewhere"
    folder.mkdir(exist_ok=True)
    for name in ("precious", "ab" + "0" * 62, "metadata.json", "state.pt"):
        (folder / name).write_text("{}")
    return folder


LINKED = ["tmp", "blobs", "entries", "changes", "blobs/*", "entries/*", "entries/*/1"]
LINKED += ["entries/*/1/metadata.json", "entries/*/1/state.pt", "blobs/*/*", "format.json"]
LINKED += ["index.sqlite", "gc.lock", "index.lock", "writer.lock", "entries/*/aliases.json"]
LINKED += ["changes/new", "tmp/new", "index.sqlite-wal", "index.sqlite-shm"]


OTHERS = ("dangling", "fifo", "folder")


@pytest.mark.parametrize(
    ("place", "kind"),
    [(place, "link") for place in LINKED]
    + [(place, OTHERS[number % 3]) for number, place in enumerate(LINKED)],
)
def test_what_is_no_file_is_never_followed(victim: Victim, place: str, kind: str) -> None:
    root, target = victim.copy(), outside(victim.room)
    before = {path.name: path.read_text() for path in target.iterdir()}
    path = next(iter(sorted(root.glob(place))), root / place)
    if path.is_dir():
        path.rename(victim.room / f"moved-{os.urandom(4).hex()}")
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(target if "." not in path.name and "/new" not in place else target / "new")
        (target / "new").touch()
        before["new"] = ""
    elif kind == "dangling":
        path.symlink_to(target / "not there yet")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        (path / "inside").mkdir(parents=True)
    victim.read()
    assert {path.name: path.read_text() for path in target.iterdir()} == before


def test_gc_removes_nothing_through_a_link(victim: Victim) -> None:
    for name in ("tmp", "blobs"):
        root, target = victim.copy(), outside(victim.room)
        (root / name).rename(root.parent / f"was-{name}-{os.urandom(4).hex()}")
        (root / name).symlink_to(target)
        with pytest.raises(NotARepo, match=name):
            ml.Repo(root).gc()
        assert (target / "precious").exists()


# ---- state.pt


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def compressed(size: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}, protocol=2))
        with archive.open("x/data/0", "w") as member:
            for _ in range(size >> 20):
                member.write(bytes(1 << 20))
    return buffer.getvalue()


def overlapping() -> bytes:
    """Many names for one stretch of the file: unpacked it is larger than the file."""
    data = saved({"t": torch.zeros(20_000)})
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        info = archive.getinfo("archive/data/0")
        for number in range(1, 200):
            twin = zipfile.ZipInfo(f"archive/data/{number}")
            twin.header_offset, twin.file_size = info.header_offset, info.file_size
            twin.compress_size, twin.CRC = info.file_size, info.CRC
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
        archive._didModify = True  # type: ignore[attr-defined]
    return buffer.getvalue()


STATES: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda canary: pickle.dumps(Bomb(canary)),
    "pickle in a zip": lambda canary: saved({"t": Bomb(canary)}),
    "zip bomb": lambda _: compressed(1 << 26),
    "overlapping": lambda _: overlapping(),
    "expanded": lambda _: saved({f"t{n}": torch.zeros(1).expand(10**10) for n in range(60)}),
    "sparse": lambda _: saved({"t0": torch.eye(3).to_sparse()}),
    "meta": lambda _: saved({"t0": torch.empty(10**12, device="meta")}),
    "parameter": lambda _: saved({"t0": nn.Parameter(torch.ones(1))}),
    "list": lambda _: saved([torch.ones(1)]),
    "nothing": lambda _: saved({}),
    "empty": lambda _: b"",
    "names": lambda _: saved({"../../x": torch.ones(1), "a\0b": torch.ones(1), 3: torch.ones(1)}),
    "other sizes": lambda _: saved({f"t{n}": torch.zeros(1) for n in range(60)}),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_forged_state(victim: Victim, tmp_path: Path, kind: str) -> None:
    root, canary = victim.copy(), tmp_path / "canary"
    data = STATES[kind](canary)
    (entry_of(victim, root) / "state.pt").write_bytes(data)
    change_record(entry_of(victim, root), state_digest=digest_of(data))
    victim.spare(victim.read())
    assert not canary.exists()


# ---- sizes that lie


def resized(value: Any, **fields: Any) -> Any:
    """The JSON with every tensor's description changed."""
    if isinstance(value, list):
        return [resized(item, **fields) for item in value]
    if not isinstance(value, dict):
        return value
    if "spec" in value:
        own = {key: item for key, item in fields.items() if key in ("offset", "nbytes")}
        spec = {key: item for key, item in fields.items() if key not in own}
        value = value | {"spec": value["spec"] | spec} | own
        return value if fields.get("kept", True) else {**value, "key": None, "blob": None}
    return {key: resized(item, **fields) for key, item in value.items()}


SIZES: dict[str, dict[str, Any]] = {
    "long": {"shape": [10**12], "stride": [1]},
    "long and expanded": {"shape": [10**12], "stride": [0]},
    "wide": {"shape": [3, 4], "stride": [10**12, 1]},
    "beyond": {"shape": [2**62, 2**62], "stride": [2**62, 1]},
    "negative": {"shape": [-3], "stride": [1]},
    "negative stride": {"shape": [3], "stride": [-1]},
    "more strides": {"shape": [3], "stride": [1, 1, 1]},
    "offset": {"offset": 10**12},
    "negative offset": {"offset": -1},
    "offset beyond": {"offset": 2**63 - 1},
    "bytes": {"nbytes": 10**15},
    "dtype": {"dtype": "complex128"},
    "dtype of nothing": {"dtype": "load"},
    "device": {"device": "cuda:99"},
    "shape only, long": {"shape": [10**12], "stride": [1], "kept": False},
    "shape only, large": {"shape": [2 * 10**9], "stride": [1], "kept": False},
    "shape only, many": {"shape": [1] * 500, "stride": [1] * 500, "kept": False},
}


@pytest.mark.parametrize("kind", SIZES)
def test_a_size_that_lies(victim: Victim, kind: str) -> None:
    root = victim.copy()
    path = entry_of(victim, root) / "metadata.json"
    record = json.loads(path.read_bytes())
    record["calls"] = resized(record["calls"], **SIZES[kind])
    path.write_text(json.dumps(record))
    victim.spare(victim.read())


@pytest.mark.parametrize("name", ["metadata.json", "aliases.json", "format.json"])
def test_a_file_that_is_too_large_to_be_read(victim: Victim, name: str) -> None:
    root = victim.copy()
    folder = entry_of(victim, root)
    path = {"aliases.json": folder.parent / name, "format.json": root / name}.get(
        name, folder / name
    )
    os.truncate(path, 1 << 40)  # sparse: no disk is needed for it
    victim.read()


# ---- the index


def forged_index(root: Path, statements: list[str]) -> None:
    db = sqlite3.connect(root / "index.sqlite")
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


INDEXES = {
    "a trigger": [
        "CREATE TRIGGER t AFTER DELETE ON entries BEGIN DELETE FROM words; END",
    ],
    "an endless view": [
        "DROP TABLE entries",
        "CREATE VIEW entries AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
        " SELECT x AS sort, x AS collection, x AS version, x AS name, x AS date FROM n",
    ],
    "texts as numbers": ["UPDATE entries SET params = 'many', calls = x'00ff'"],
    "blobs as names": ["UPDATE entries SET name = x'ff00', date = 3"],
    "words that are none": ["UPDATE OR REPLACE words SET json = 'no json'"],
    "words of another kind": ["UPDATE OR REPLACE words SET json = '{\"a\": [1]}'"],
    "words as blobs": ["UPDATE OR REPLACE words SET json = x'00'"],
    "no words": ["DELETE FROM words", "DELETE FROM items"],
    "numbers beyond": ["UPDATE entries SET model = 1e300, cls = -1"],
    "texts that are none": ["UPDATE entries SET name = CAST(x'ff41' AS TEXT)"],
    "huge": ["UPDATE entries SET params = zeroblob(10000000)"],
    "another version": ["PRAGMA user_version = 99"],
    "more tables": ["CREATE TABLE more (a)"],
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_forged_index(victim: Victim, kind: str) -> None:
    root = victim.copy()
    forged_index(root, INDEXES[kind])
    victim.spare(victim.read())


def test_fsck_knows_an_index_that_lies(victim: Victim) -> None:
    root = victim.copy()
    forged_index(root, ["UPDATE entries SET params = 7 WHERE name = 'good'"])
    repo = ml.Repo(root)
    assert repo.rows({"fqn": ""})[0].params == 7
    assert [problem.code for problem in repo.fsck().problems] == ["NOT_INDEXED"]
    repo.reindex()
    assert repo.fsck().ok


# ---- code in places that are read


def test_no_code_is_taken_from_the_repo(victim: Victim, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w')\nfrom torch import nn\nclass Gate(nn.Module): pass\n"
    root = victim.copy()
    entry = entry_of(victim, root)
    (entry / "evil.py").write_text(code)
    (root / "evil.py").write_text(code)
    for place in (root, entry, Path(os.path.relpath(root))):
        for fields in (
            {"roots": {"evil": str(place)}, "packages": ["evil"], "cls": "evil:Gate"},
            {"main_file": str(place / "evil.py"), "packages": ["__main__"], "cls": "__main__:Gate"},
        ):
            change_record(entry, **fields)
            node = json.loads((entry / "metadata.json").read_bytes())["node"]
            blob = root / "blobs" / node[:2] / node
            forged = json.loads(blob.read_bytes()) | {"cls": fields["cls"]}
            attacks.plant(root, entry, node, json.dumps(forged).encode())
            victim.read("net@v1")
            assert not canary.exists(), fields


def test_a_module_that_exits_when_imported_ends_nothing(
    victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    root = victim.copy()
    entry = entry_of(victim, root)
    change_record(entry, packages=["leaves_at_once"])
    node = json.loads((entry / "metadata.json").read_bytes())["node"]
    blob = root / "blobs" / node[:2] / node
    forged = json.loads(blob.read_bytes()) | {"cls": "leaves_at_once:Gate"}
    attacks.plant(root, entry, node, json.dumps(forged).encode())
    with pytest.raises(ModuleLensError, match="SystemExit"):
        ml.Repo(root)[ATTACKED].rebuild()
    victim.spare(victim.read())


def test_a_class_that_is_gone_is_looked_for_in_sound_folders_only(
    victim: Victim, tmp_path: Path
) -> None:
    root = victim.copy()
    entry = entry_of(victim, root)
    (tmp_path / "gone_package").mkdir()
    os.mkfifo(tmp_path / "gone_package" / "endless.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone_package" / "kept.py").write_text("class Kept:\n    pass\n")
    for place in (str(tmp_path), str(root), "/", "", ".", "x" * 5000, "a\0b"):
        for cls in ("gone_package:Gate\\g<9>", ":x", "../../gone:x", "gone_package.x:y"):
            package = cls.partition(":")[0].partition(".")[0]
            fields = {"roots": {package: place}, "packages": [package], "sources": {cls: "a" * 64}}
            change_record(entry, cls=cls, **fields)
            node = json.loads((entry / "metadata.json").read_bytes())["node"]
            document = json.loads((root / "blobs" / node[:2] / node).read_bytes())
            attacks.plant(root, entry, node, json.dumps(document | {"cls": cls}).encode())
            victim.read("net@v1 structure")


PATHS = [
    *(
        "os:system",
        "builtins:eval",
        "builtins:exec",
        "subprocess:Popen",
        "torch:save",
        "torch:load",
    ),
    *(
        "torch.serialization:save",
        "numpy:save",
        "numpy:fromfile",
        "torch.jit:load",
        "shutil:rmtree",
    ),
    *("pathlib:Path.unlink", "pathlib:Path.write_text", "numpy.lib.npyio:save", "torch:relu"),
    *("modulelens.__main__:main", "torch.hub:load", "torch:sys", "sys:exit", "torch.nn:Linear"),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_class_path_that_is_no_module_of_the_entry(
    victim: Victim, tmp_path: Path, path: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    act = {"$partial": [{"$function": path}, {"$tuple": [{"$path": str(precious)}]}, {}]}
    for fields in ({"cls": path}, {"attributes": {"act": act}}):
        root = victim.copy()
        entry = entry_of(victim, root)
        node = json.loads((entry / "metadata.json").read_bytes())["node"]
        document = json.loads((root / "blobs" / node[:2] / node).read_bytes())
        if "attributes" in fields:
            fields = {"attributes": document["attributes"] | fields["attributes"]}
        attacks.plant(root, entry, node, json.dumps(document | fields).encode())
        victim.read("net@v1 ")
        assert precious.read_text() == "mine"
