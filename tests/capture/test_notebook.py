"""A notebook's ways: cells that run again, classes defined again, blocks that were never left."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, hooks_of, rows
from torch import nn

import modulelens as ml
from modulelens.errors import Conflict
from modulelens.records import Status

CELL = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) {after}
"""


class Notebook:
    """A module whose code comes in cells, as an interactive session's does."""

    def __init__(self, file: Path | None = None) -> None:
        self.module = types.ModuleType("cells")
        self.file = file
        self.count = 0

    def run(self, text: str) -> None:
        self.count += 1
        name = str(self.file) if self.file else f"<ipython-input-{self.count}-cells>"
        if self.file:
            text = (self.file.read_text() if self.file.exists() else "") + text
            self.file.write_text(text)
            linecache.checkcache(name)
        else:
            linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        exec(compile(text, name, "exec"), vars(self.module))

    def model(self) -> nn.Module:
        return self.module.Net()  # type: ignore[no-any-return]


@pytest.fixture(params=["cells", "one file"])
def notebook(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path / "cells.py" if request.param == "one file" else None)
    sys.modules["cells"] = made.module
    yield made
    del sys.modules["cells"]


def entry_of(model: nn.Module, repo: Path) -> ml.Entry:
    with ml.trace(model, name="net") as trace:
        model(rows())
    return add_unverified(trace, repo)[0]


def test_the_source_is_that_of_the_code_that_ran(notebook: Notebook, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    notebook.run(CELL.format(after="+ 1"))
    old = notebook.model()
    first = entry_of(old, repo)
    notebook.run(CELL.format(after="* 100"))
    second, late = entry_of(notebook.model(), repo), entry_of(old, repo)
    for entry, code in ((first, "+ 1"), (second, "* 100"), (late, "+ 1")):
        assert entry.source is not None
        assert entry.source.text.rstrip().endswith(code)
        assert entry.source.text.count("class Net") == 1
        assert entry.source.reliable
    assert first.source.digest != second.source.digest  # type: ignore[union-attr]
    assert second.check().status is Status.EXACT
    # What was captured from the old class runs today's code, and the verdict says so.
    for entry in (first, late):
        check = entry.check()
        assert not check.status.passed
        assert any("source of cells:Net changed" in text for text in check.warnings)
    assert "defined again since" in late._replay().payload.node(late.metadata.node).refused


def test_a_cell_that_runs_again_adds_a_version(notebook: Notebook, tmp_path: Path) -> None:
    for version in (1, 2):
        notebook.run(CELL.format(after="+ 1"))
        model = notebook.model()
        entry = entry_of(model, tmp_path / "repo")
        assert (entry.version, hooks_of(model)) == (version, {})
        assert entry.check().status is Status.EXACT


def test_a_trace_that_was_never_left_can_be_ended() -> None:
    model = zoo.CalledTwice()
    before = dict(vars(zoo.CalledTwice))
    lost = ml.trace(model).__enter__()
    model(rows())
    with pytest.raises(Conflict, match="test_notebook") as caught, ml.trace(model):
        raise AssertionError("not reached")
    assert "ml.end_traces()" in caught.value.hint
    ml.end_traces()
    ml.end_traces()
    assert hooks_of(model) == {}
    assert dict(vars(zoo.CalledTwice)) == before
    assert len(lost.captures) == 3
    with ml.trace(model) as again:
        model(rows())
    assert len(again.captures) == 3


def test_a_cell_interrupted_in_the_step_can_run_again() -> None:
    model = zoo.Raises(KeyboardInterrupt())
    with ml.trace(model) as trace:
        with pytest.raises(KeyboardInterrupt):
            model(rows())
        model.error = None
        model(rows())
    assert trace.done
    assert trace.warnings == ["step aborted: KeyboardInterrupt; nothing of it is kept"]
    assert [len(c.calls) for c in trace.captures] == [1, 1]


def test_two_models_of_one_name_are_versions_and_of_two_names_are_two(tmp_path: Path) -> None:
    for name in ("student", "teacher", "student"):
        with ml.trace(zoo.CalledTwice(), name=name) as trace:
            trace.model(rows())
        add_unverified(trace, tmp_path / "repo")
    repo = ml.Repo(tmp_path / "repo")
    found = {(e.model, e.version) for e in repo.find({"fqn": "layer"})}
    assert found == {("student", 1), ("student", 2), ("teacher", 1)}
    newest, second = repo["student/layer"], repo["student/layer@v2"]
    assert newest.id == second.id
    assert torch.equal(newest.rebuild().weight, trace.model.layer.weight)
