"""What goes wrong, and what is said then: code, message, next step; and nothing is lost."""

from __future__ import annotations

import importlib
import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, hooks_of, rows
from torch import nn

import modulelens as ml
from modulelens.errors import (
    ClassNotFound,
    Conflict,
    Corrupted,
    DiskFull,
    ModuleLensError,
    NotARepo,
    NotFound,
    NotRebuildable,
    SchemaTooNew,
    UsageError,
)


def said(error: pytest.ExceptionInfo[ModuleLensError]) -> tuple[str, str, str]:
    """Code, message and hint; every error has the last two, and shows both."""
    found = error.value
    assert found.message in str(found)
    assert not found.hint or found.hint in str(found)
    return found.code, found.message, found.hint


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, ml.Entry]:
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with ml.trace(body, name="net") as trace:
        body(rows())
    return {entry.fqn: entry for entry in add_unverified(trace, tmp_path / "repo")}


@pytest.fixture
def repo(entries: dict[str, ml.Entry]) -> ml.Repo:
    return ml.Repo(entries[""]._store.root)


def intact(repo: ml.Repo, *but: str) -> None:
    """Every entry but these can be read, rebuilt and checked."""
    for entry in ml.Repo(repo.root):
        if entry.name not in but:
            assert entry.check(), entry.name


# ---- names


@pytest.mark.parametrize(
    ("ref", "close"), [("net/O", "net/0"), ("nett/0", "net/0"), ("net/1@v9", ""), ("nothing", "")]
)
def test_an_unknown_entry(repo: ml.Repo, ref: str, close: str) -> None:
    with pytest.raises(NotFound) as caught:
        repo[ref]
    code, message, hint = said(caught)
    assert code == "NOT_FOUND"
    assert repr(ref.partition("@")[0]) in message
    assert hint
    assert not close or close in caught.value.did_you_mean
    assert caught.value.exit_code == 3


def test_an_unknown_fqn() -> None:
    with pytest.raises(NotFound) as caught:
        ml.trace(zoo.SharedChild(), modules="lefft.0")
    code, message, hint = said(caught)
    assert (code, message) == ("NOT_FOUND", "no module matches 'lefft.0'")
    assert "left.0" in caught.value.did_you_mean
    assert "Linear" in hint


def test_an_unknown_call(entries: dict[str, ml.Entry]) -> None:
    for use in (entries["0"].rebuild, entries["0"].inputs, entries["0"].run):
        with pytest.raises(NotFound, match=r"net/0 has 1 call\(s\); there is no call 5"):
            use(call=5)
        with pytest.raises(NotFound, match="no call -1"):
            use(call=-1)


def test_a_module_that_is_never_called(tmp_path: Path) -> None:
    model = zoo.CallsAnotherMethod()
    with ml.trace(model, modules="skipped") as trace:
        model(rows())
    with pytest.raises(NotFound) as caught:
        ml.Repo(tmp_path / "repo").add(trace)
    code, message, hint = said(caught)
    assert code == "NOT_FOUND"
    assert "holds nothing to store" in message
    assert hint == "see trace.coverage"
    assert [(c.fqn, c.fate.value) for c in trace.coverage] == [("skipped", "not called")]


def test_a_trace_without_a_step(tmp_path: Path) -> None:
    with (
        pytest.warns(
            UserWarning, match=r"no step of CalledTwice was traced: 0 step\(s\) were seen"
        ),
        ml.trace(zoo.CalledTwice()) as trace,
    ):
        pass
    with pytest.raises(NotFound, match="holds nothing to store"):
        ml.Repo(tmp_path / "repo").add(trace)
    assert len(ml.Repo(tmp_path / "repo")) == 0


def test_a_trace_that_has_not_begun_or_not_ended(tmp_path: Path) -> None:
    model = zoo.CalledTwice()
    trace = ml.trace(model)
    with pytest.raises(NotFound):
        ml.Repo(tmp_path / "repo").add(trace)
    with trace:
        model(rows())
        with pytest.raises(NotFound, match="holds nothing to store"):
            ml.Repo(tmp_path / "repo").add(trace)
    assert len(ml.Repo(tmp_path / "repo").add(trace, verify=False)) == 3


# ---- classes


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[Callable[[str], ml.Entry]]:
    """An entry of a class in a module whose file then gets another text."""
    names = []

    def make(text: str) -> ml.Entry:
        name = f"going_{len(names)}_{tmp_path.name}".replace("-", "_")
        names.append(name)
        file = tmp_path / f"{name}.py"
        head = "import torch\nfrom torch import nn\n"
        body = "class Layer(nn.Linear):\n    pass\n"
        file.write_text(head + body)
        sys.path.insert(0, str(tmp_path))
        model = importlib.import_module(name).Layer(4, 4)
        with ml.trace(model, name=name) as trace:
            model(rows())
        entry = add_unverified(trace, tmp_path / "repo")[0]
        file.write_text(head + text)
        del sys.modules[name]
        importlib.invalidate_caches()
        file.touch()
        for cached in (tmp_path / "__pycache__").glob("*"):
            cached.unlink()
        return entry

    yield make
    for name in names:
        sys.modules.pop(name, None)
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("class Other(nn.Linear): pass", "has no 'Layer'", "class_map"),
        ("import not_there_at_all", "No module named 'not_there_at_all'", "not_there_at_all"),
        ("1 / 0", "ZeroDivisionError", "python -c"),
        ("Layer = 3", "is no nn.Module class", "replaced"),
    ],
)
def test_a_class_that_cannot_be_had(
    gone: Callable[[str], ml.Entry], text: str, says: str, hint: str
) -> None:
    entry = gone(text)
    with pytest.raises(ClassNotFound) as caught:
        entry.rebuild()
    code, message, next_step = said(caught)
    assert code == "CLASS_NOT_FOUND"
    assert caught.value.exit_code == 5
    assert says in message
    assert entry.cls in message
    assert hint in next_step
    check = entry.check()
    assert check.status is ml.Status.RUNTIME_ERROR
    assert says in check.reason
    assert torch.equal(entry.inputs()[0][0], rows())  # its data is there all the same


def test_a_class_that_was_made_inside_a_function(tmp_path: Path) -> None:
    class Here(nn.Linear):
        pass

    model = Here(4, 4)
    with ml.trace(model) as trace:
        model(rows())
    with pytest.warns(UserWarning, match="1 of 1 entries cannot be rebuilt exactly"):
        (entry,) = ml.Repo(tmp_path / "repo").add(trace)
    assert entry.grade is not None
    assert entry.grade.level.value == "no"
    assert entry.grade.reasons["outputs"][0] == "not_importable"
    with pytest.raises(NotRebuildable, match="Here is not importable") as caught:
        entry.rebuild()
    assert caught.value.reason == "not_importable"
    assert torch.equal(entry.outputs(), model(rows()))


# ---- bytes


def blob_of(entry: ml.Entry, repo: ml.Repo) -> Path:
    """The file of the entry's weight, which is the largest of its own."""
    other = set(repo["net/1"].metadata.blobs)
    sizes = {d: n for d, n in entry.metadata.blobs.items() if d not in other}
    digest = next(d for d in sizes if sizes[d] == 64)
    return next((repo.root / "blobs").rglob(digest))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "altered": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_payload(repo: ml.Repo, entries: dict[str, ml.Entry], damage: str) -> None:
    file = blob_of(entries["0"], repo)
    file.chmod(0o644)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    entry = ml.Repo(repo.root)["net/0"]
    with pytest.raises(Corrupted) as caught:
        entry.rebuild()
    code, message, hint = said(caught)
    assert code == "CORRUPTED"
    assert file.name[:12] in message
    assert "fsck" in hint
    with pytest.raises(Corrupted):  # damage of the repo is no verdict on the module's code
        entry.check()
    report = ml.Repo(repo.root).fsck()
    assert not report.ok
    intact(repo, "net", "net/0")


def test_a_payload_that_is_gone(repo: ml.Repo, entries: dict[str, ml.Entry]) -> None:
    blob_of(entries["0"], repo).unlink()
    with pytest.raises(ModuleLensError) as caught:
        ml.Repo(repo.root)["net/0"].rebuild()
    code, _, hint = said(caught)
    assert code in ("CORRUPTED", "NOT_FOUND")
    assert hint
    intact(repo, "net", "net/0")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda text: text[: len(text) // 2], Corrupted),
        (lambda text: "", Corrupted),
        (lambda text: json.dumps(json.loads(text) | {"schema": 999}), SchemaTooNew),
        (lambda text: json.dumps(json.loads(text) | {"calls": 3}), Corrupted),
        (lambda text: json.dumps(json.loads(text) | {"schema": -1}), Corrupted),
    ],
)
def test_a_damaged_or_newer_record(
    repo: ml.Repo, entries: dict[str, ml.Entry], change: Any, error: type[ModuleLensError]
) -> None:
    file = repo.root / "entries" / entries["0"].id / "metadata.json"
    file.chmod(0o644)
    file.write_text(change(file.read_text()))
    with pytest.raises(error) as caught:
        ml.Repo(repo.root)["net/0"]
    code, message, hint = said(caught)
    assert code == {Corrupted: "CORRUPTED", SchemaTooNew: "SCHEMA_TOO_NEW"}[error]
    assert str(file) in message or entries["0"].id in message
    assert "upgrade" in hint if error is SchemaTooNew else True
    assert ml.Repo(repo.root)["net/1"].check()


def test_a_full_disk_loses_nothing(repo: ml.Repo) -> None:
    model = nn.Linear(256, 256)
    with ml.trace(model, name="large") as trace:
        model(torch.ones(2, 256))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DiskFull) as caught:
            repo.add(trace, verify=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    code, message, hint = said(caught)
    assert code == "DISK_FULL"
    assert str(repo.root) in message
    assert hint
    assert "large" not in repo
    intact(repo)
    assert repo.fsck().ok
    assert len(repo.add(trace, verify=False)) == 1  # the trace is not lost either
    intact(repo)


# ---- repos


def test_a_repo_path_that_is_something_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(NotARepo) as caught:
        ml.Repo(file)
    code, message, hint = said(caught)
    assert (code, hint) == ("NOT_A_REPO", "give the path of a folder")
    assert str(file) in message
    assert file.read_text() == "mine"
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.png").write_bytes(b"cat")
    with pytest.raises(NotARepo, match="photos"):
        ml.Repo(folder)
    assert [p.name for p in folder.iterdir()] == ["cat.png"]


def test_a_repo_of_a_newer_version(repo: ml.Repo) -> None:
    file = repo.root / "format.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 999}))
    with pytest.raises(SchemaTooNew) as caught:
        ml.Repo(repo.root)
    assert "999" in said(caught)[1]


# ---- models and sessions


@pytest.mark.parametrize(
    ("model", "says", "hint"),
    [
        (nn.Linear, "the class Linear, not a module", "pass an instance: Linear(...)"),
        (lambda x: x, "a function, not an nn.Module", "called once per training step"),
        (None, "a NoneType, not an nn.Module", "pass the module"),
        ([nn.Linear(1, 1)], "a list, not an nn.Module", "pass the module"),
    ],
)
def test_a_model_that_is_none(model: Any, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ml.trace(model)
    code, message, next_step = said(caught)
    assert code == "USAGE_ERROR"
    assert caught.value.exit_code == 2
    assert says in message
    assert hint in next_step


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_interruption_inside_the_step(repo: ml.Repo, error: BaseException) -> None:
    model = zoo.Raises(error)
    with pytest.raises(type(error)) as caught, ml.trace(model) as trace:
        model(rows())
    assert caught.value is error
    assert hooks_of(model) == {}
    with pytest.raises(NotFound) as nothing:
        repo.add(trace)
    assert f"step aborted: {type(error).__name__}" in said(nothing)[1]
    intact(repo)


def test_two_traces_of_one_model_at_once(repo: ml.Repo) -> None:
    model = zoo.CalledTwice()
    with ml.trace(model, name="outer") as outer:
        with pytest.raises(Conflict) as caught, ml.trace(model):
            pass
        model(rows())
    code, message, hint = said(caught)
    assert (code, caught.value.exit_code) == ("CONFLICT", 6)
    assert "traced already (since" in message
    assert "leave that" in hint
    assert len(repo.add(outer, verify=False)) == 3
    intact(repo)
