"""The edit loop: save a file, get the verdict that a new process would give, whatever was saved."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.capture.loop import add_unverified, rows
from tests.cli.test_output import assert_fits_schema
from tests.rebuild import conftest

import modulelens as ml
from modulelens.errors import NotFound, UsageError
from modulelens.measure import files as files_module
from modulelens.measure.files import Files

worker, elsewhere = conftest.worker, conftest.elsewhere

FILES = {
    "__init__.py": "from .layers.gate import Gate\n",
    "settings/__init__.py": "",
    "settings/numbers.py": "SCALE = 2.0\nOFFSET = 0.5\n",
    "ops.py": "def squash(x):\n    return x.tanh()\n",
    "layers/__init__.py": "",
    "layers/base.py": """
import torch
from torch import nn
from ..settings.numbers import OFFSET

class Base(nn.Module):
    def finish(self, x):
        return x + OFFSET
""",
    "layers/gate.py": """
import torch
from torch import nn
import numpy.polynomial
from PACKAGE.settings import numbers
from .. import ops
from .base import Base

class Gate(Base):
    def __init__(self, width, gain=1.0):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.gain = gain

    def forward(self, x):
        return self.finish(ops.squash(self.lin(x)) * numbers.SCALE * self.gain)
""",
}
GATE, NUMBERS, OPS, BASE = "layers/gate.py", "settings/numbers.py", "ops.py", "layers/base.py"
_count = itertools.count()


class Package:
    """A package of the user's, an entry of a module of it, and the verdicts of a loop on it."""

    def __init__(self, folder: Path) -> None:
        self.name = f"watched_package_{next(_count)}"
        self.folder = folder / "code" / self.name
        self.put_back()
        self.repo = folder / "repo"
        torch.manual_seed(0)
        sys.path.insert(0, str(self.folder.parent))
        try:
            with ml.track_init():
                gate = importlib.import_module(self.name).Gate(4)
        finally:
            sys.path.pop(0)
        with ml.trace(gate, name="net") as trace:
            gate(rows())
        self.entry = next(e for e in add_unverified(trace, self.repo) if not e.fqn)

    def text(self, name: str) -> str:
        return FILES[name].replace("PACKAGE", self.name)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def put_back(self) -> None:
        for name in FILES:
            path = self.folder / name
            if not path.is_file() or path.read_text() != self.text(name):
                self.write(name, self.text(name))

    def edit(self, name: str, old: str, new: str) -> None:
        text = self.text(name)
        assert old in text
        self.write(name, text.replace(old, new))

    def forget(self) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == self.name]:
            del sys.modules[name]


class Loop:
    """Verdicts of `entry.watch`, one at a time."""

    def __init__(self, entry: ml.Entry, candidate: str | None = None, **options: Any) -> None:
        self.started = threading.Event()
        self._verdicts = entry.watch(candidate, started=self._note, **options)
        self.first = next(self._verdicts)
        self._note(())

    def _note(self, _changed: tuple[str, ...]) -> None:
        self.started.set()

    def next(self) -> ml.Check:
        return next(self._verdicts)

    def close(self) -> None:
        self._verdicts.close()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    made = Package(tmp_path_factory.mktemp("watched"))
    yield made
    made.forget()


@pytest.fixture(scope="module")
def running(package: Package) -> Iterator[Loop]:
    with contextlib.closing(Loop(package.entry, timeout_s=60)) as loop:
        yield loop


@pytest.fixture
def loop(running: Loop, package: Package) -> Iterator[Loop]:
    """The loop, the files as they were when they were captured, before and after."""
    yield running
    package.put_back()
    assert running.next().status is ml.Status.EXACT


def facts(check: ml.Check | dict[str, Any]) -> dict[str, Any]:
    """A verdict without what only a loop says."""
    found = json.loads(msgspec.json.encode(check))
    return {k: v for k, v in found.items() if k not in ("changed", "after_save_s", "printed")}


def test_the_first_verdict_needs_no_edit(running: Loop) -> None:
    assert running.first.status is ml.Status.EXACT
    assert running.first.changed == ()
    assert running.first.after_save_s is None


EDITS = {
    "forward": (GATE, "* self.gain", "* self.gain * 1.5", "MISMATCH_VALUE"),
    "forward, the same": (GATE, "numbers.SCALE * self", "(numbers.SCALE) * self", "EXACT"),
    "constructor": (GATE, "nn.Linear(width, width)", "nn.Linear(width, 2)", "MISMATCH_SHAPE"),
    "new parameter": (
        GATE,
        "self.gain = gain",
        "self.gain = nn.Parameter(torch.ones(width))",
        "EXACT",
    ),
    "helper function": (OPS, "x.tanh()", "x.sigmoid()", "MISMATCH_VALUE"),
    "base class": (BASE, "x + OFFSET", "(x + OFFSET)[:1]", "MISMATCH_SHAPE"),
    "constant in a submodule": (NUMBERS, "SCALE = 2.0", "SCALE = 2.5", "MISMATCH_VALUE"),
    "constant by from-import": (NUMBERS, "OFFSET = 0.5", "OFFSET = 0.6", "MISMATCH_VALUE"),
    "package": ("__init__.py", "import Gate", "import Gate as Gate", "EXACT"),
    "syntax": (GATE, "def forward(self, x):", "def forward(self, x:", "RUNTIME_ERROR"),
    "syntax of an import": (OPS, "return x.tanh()", "return x.tanh(", "RUNTIME_ERROR"),
    "missing import": (BASE, "import torch\n", "import no_such_module_here\n", "RUNTIME_ERROR"),
    "missing name": (GATE, "import ops", "import no_such_name", "RUNTIME_ERROR"),
    "module level": (NUMBERS, "SCALE = 2.0", "SCALE = 2.0 / 0", "RUNTIME_ERROR"),
    "raises": (OPS, "x.tanh()", "x.no_such_method()", "RUNTIME_ERROR"),
    "class renamed": (GATE, "class Gate", "class Gone", "RUNTIME_ERROR"),
}


@pytest.mark.parametrize(("file", "old", "new", "status"), EDITS.values(), ids=EDITS)
def test_the_verdict_after_an_edit_is_that_of_a_new_process(
    loop: Loop,
    package: Package,
    elsewhere: Callable[..., Any],
    file: str,
    old: str,
    new: str,
    status: str,
) -> None:
    package.edit(file, old, new)
    found = loop.next()
    assert found.status.value == status, found.reason
    assert [Path(name).name for name in found.changed] == [Path(file).name]
    assert found.after_save_s is not None
    assert found.after_save_s >= 0
    fresh = elsewhere("check", repo=str(package.repo), ref=package.entry.id)
    assert facts(found) == facts(fresh)


@pytest.mark.parametrize("kind", ["syntax", "syntax of an import", "raises", "module level"])
def test_a_fault_is_told_with_file_and_line(loop: Loop, package: Package, kind: str) -> None:
    file, old, new, _ = EDITS[kind]
    package.edit(file, old, new)
    line = (package.folder / file).read_text().split(new)[0].count("\n") + 1
    assert f"{Path(file).name}:{line}" in loop.next().reason


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os._exit(0)", "exited with code 0"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("print('seen', 3); raise ValueError('no')", "ValueError: no"),
    ],
)
@pytest.mark.parametrize("where", ["call", "import"])
def test_what_ends_the_process_is_a_verdict_and_the_loop_goes_on(
    loop: Loop, package: Package, code: str, says: str, where: str
) -> None:
    if where == "call":
        package.edit(OPS, "    return", f"    {code}\n    return")
    else:
        package.write(OPS, f"{package.text(OPS)}\n{code}\n")
    found = loop.next()
    assert found.status is ml.Status.RUNTIME_ERROR
    assert says in found.reason
    assert ("seen 3" in found.printed) == ("seen" in code)
    if "SIGSEGV" in says or "ValueError" in says:
        assert "ops.py:" in found.reason


def test_a_save_ends_a_check_that_never_would_and_what_was_saved_is_checked(
    loop: Loop, package: Package
) -> None:
    loop.started.clear()
    package.edit(OPS, "    return", "    while True: pass\n    return")

    def mend() -> None:
        loop.started.wait(60)
        time.sleep(0.3)
        package.edit(OPS, "x.tanh()", "x.sigmoid()")

    thread = threading.Thread(target=mend)
    thread.start()
    found = loop.next()
    thread.join()
    assert found.status is ml.Status.MISMATCH_VALUE


def test_a_file_put_back_while_its_edit_is_checked_leaves_no_verdict_out(
    loop: Loop, package: Package
) -> None:
    loop.started.clear()
    package.edit(OPS, "    return", "    while True: pass\n    return")

    def put_back() -> None:
        loop.started.wait(60)
        time.sleep(0.3)
        package.put_back()

    thread = threading.Thread(target=put_back)
    thread.start()
    assert loop.next().status is ml.Status.EXACT
    thread.join()
    package.edit(OPS, "x.tanh()", "x.sigmoid()")
    assert loop.next().status is ml.Status.MISMATCH_VALUE


def test_edits_of_the_same_size_within_a_second_are_all_seen(loop: Loop, package: Package) -> None:
    for scale, status in (("3", "MISMATCH_VALUE"), ("2", "EXACT"), ("4", "MISMATCH_VALUE")):
        package.edit(NUMBERS, "SCALE = 2.0", f"SCALE = {scale}.0")
        assert loop.next().status.value == status


def test_editors_that_replace_or_remove_the_file_are_followed(loop: Loop, package: Package) -> None:
    path = package.folder / OPS
    for function, status in (("sigmoid", "MISMATCH_VALUE"), ("tanh", "EXACT")):
        new = path.with_suffix(".tmp")
        new.write_text(package.text(OPS).replace("tanh", function))
        new.replace(path)
        assert loop.next().status.value == status
    path.unlink()
    path.write_text(package.text(OPS).replace("tanh", "sigmoid"))
    assert loop.next().status is ml.Status.MISMATCH_VALUE


@pytest.mark.parametrize("file", [GATE, OPS])
def test_a_deleted_file_is_a_verdict_that_says_so(loop: Loop, package: Package, file: str) -> None:
    (package.folder / file).unlink()
    found = loop.next()
    assert found.status is ml.Status.RUNTIME_ERROR
    assert Path(file).stem in found.reason
    assert [Path(name).name for name in found.changed] == [Path(file).name]


def test_a_file_that_an_import_misses_is_waited_for(loop: Loop, package: Package) -> None:
    package.edit(OPS, "x.tanh()", "x.tanh()\nfrom .later.parts import part")
    assert "later" in loop.next().reason
    package.write("later/__init__.py", "")
    assert "later.parts" in loop.next().reason
    package.write("later/parts.py", "part = 1\n")
    found = loop.next()
    assert found.status is ml.Status.EXACT
    assert [Path(name).name for name in found.changed] == ["parts.py"]


def test_a_file_that_is_imported_since_the_last_edit_is_watched(
    loop: Loop, package: Package
) -> None:
    package.write("extra.py", "FACTOR = 1.0\n")
    package.edit(OPS, "def", "from .extra import FACTOR\ndef")
    assert loop.next().status is ml.Status.EXACT
    package.write("extra.py", "def FACTOR(:\n")
    assert "extra.py:1" in loop.next().reason


def test_a_save_that_changes_nothing_asks_for_no_verdict(loop: Loop, package: Package) -> None:
    package.write(OPS, package.text(OPS))
    time.sleep(0.1)
    package.edit(NUMBERS, "SCALE = 2.0", "SCALE = 3.0")
    assert [Path(name).name for name in loop.next().changed] == ["numbers.py"]


def test_a_check_that_does_not_end_in_time_is_told_with_its_place(package: Package) -> None:
    with contextlib.closing(Loop(package.entry, timeout_s=1.5)) as loop:
        package.edit(OPS, "    return", "    while True:\n        pass\n    return")
        found = loop.next()
        assert found.status is ml.Status.TIMEOUT
        assert "did not end within 1.5 s" in found.reason
        assert "in squash" in found.reason
        assert "ops.py:" in found.reason
        package.put_back()
        assert loop.next().status is not ml.Status.MISMATCH_VALUE


def test_a_candidate_and_what_it_imports_are_watched(package: Package, tmp_path: Path) -> None:
    (tmp_path / "part_of_candidate.py").write_text("FACTOR = 2.0\n")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import part_of_candidate as part\n"
        f"from {package.name}.layers.gate import Gate\n"
        "class Mine(Gate):\n"
        "    def forward(self, x):\n"
        "        return self.lin(x).tanh() * part.FACTOR + 0.5\n"
    )
    with contextlib.closing(Loop(package.entry, f"{mine}:Mine")) as loop:
        assert loop.first
        assert loop.first.code == f"{mine}:Mine"
        (tmp_path / "part_of_candidate.py").write_text("FACTOR = 3.0\n")
        assert loop.next().status is ml.Status.MISMATCH_VALUE
        mine.write_text(mine.read_text().replace("part.FACTOR", "2.0"))
        assert loop.next()
        text = mine.read_text()
        for broken, says in (("def f(:\n", "mine.py:1: SyntaxError"), (None, "there is no file")):
            mine.write_text(broken) if broken else mine.unlink()
            found = loop.next()
            assert found.status is ml.Status.RUNTIME_ERROR
            assert says in found.reason
        mine.write_text(text.replace("Mine", "Other"))
        assert "defines no 'Mine'" in loop.next().reason
        mine.write_text(text)
        assert loop.next()


def test_what_is_not_there_at_the_start_is_an_error(package: Package) -> None:
    for options, error in (
        ({"candidate": "nowhere.py:Mine"}, NotFound),
        ({"candidate": "nonsense"}, UsageError),
    ):
        with pytest.raises(error), contextlib.closing(package.entry.watch(**options)) as verdicts:
            next(verdicts)


def test_own_code_that_a_package_imports_is_seen_when_it_is_edited(tmp_path: Path) -> None:
    package = Package(tmp_path)
    installed = package.folder.parent / "site-packages"
    installed.mkdir()
    name = f"plugin_of_{package.name}"
    (installed / f"{name}.py").write_text(f"from {package.name}.settings.numbers import SCALE\n")
    package.write(
        OPS,
        f"import sys; sys.path.append({str(installed)!r})\nfrom {name} import SCALE\n"
        + package.text(OPS).replace("x.tanh()", "x.tanh() * SCALE / 2.0"),
    )
    with contextlib.closing(Loop(package.entry)) as loop:
        assert loop.first, loop.first.reason
        package.write(OPS, (package.folder / OPS).read_text().replace("SCALE / 2.0", "(SCALE / 2)"))
        assert loop.next()
        package.edit(NUMBERS, "SCALE = 2.0", "SCALE = 4.0")
        assert loop.next().status is ml.Status.MISMATCH_VALUE
    package.forget()


# ---- the command


class Command:
    """`modulelens check --watch --json` in a process of its own."""

    def __init__(self, package: Package, *words: str) -> None:
        command = [sys.executable, "-m", "modulelens", "check", "net", "--watch", "--json"]
        self.process = subprocess.Popen(
            [*command, "--repo", str(package.repo), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert_fits_schema("check", line)
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def end(self, how: int) -> int:
        self.process.send_signal(how)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.mark.parametrize("passes", [True, False])
def test_the_command_prints_an_envelope_per_verdict_and_ends_with_the_last_ones_code(
    package: Package, passes: bool
) -> None:
    command = Command(package, "--timeout", "60")
    try:
        assert command.answer()["data"]["status"] == "EXACT"
        package.edit(NUMBERS, "SCALE = 2.0", "SCALE = 2.00" if passes else "SCALE = 3.0")
        second = command.answer()
        assert second["ok"] is passes
        assert second["data"]["changed"][0].endswith("numbers.py")
        assert second["data"]["after_save_s"] >= 0
        assert command.end(signal.SIGINT) == (0 if passes else 4)
    finally:
        package.put_back()
        command.process.kill()
        command.process.communicate()


def test_a_watch_of_nothing_ends_with_the_error(package: Package) -> None:
    command = Command(package, "nowhere.py:Mine")
    answer = command.answer()
    assert answer["error"]["code"] == "NOT_FOUND"
    assert command.process.wait(timeout=60) == 3
    command.process.communicate()


# ---- the files


def test_an_editor_may_leave_a_file_empty_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_BACK_S", 30.0)
    path = tmp_path / "a.py"
    path.write_text("one")
    files = Files()
    files.add([str(path)])
    path.write_text("")
    files.wait()
    threading.Timer(0.3, path.write_text, ["two"]).start()
    found, saved = files.settled()
    files.know(found)
    assert path.read_text() == "two"
    assert list(found) == [str(path)]
    assert saved <= time.time()
    assert not files.changed()


def test_a_file_is_known_by_its_content_whatever_its_times_say(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("one")
    files = Files()
    files.add([str(path), str(tmp_path / "missing.py")])
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert list(files.changed()) == [str(path)]
    path.write_text("one")
    assert not files.changed()
    (tmp_path / "missing.py").write_text("")
    assert list(files.changed()) == [str(tmp_path / "missing.py")]


def test_the_class_is_not_imported_where_the_loop_is_asked_for(package: Package) -> None:
    package.forget()
    with contextlib.closing(package.entry.watch()) as verdicts:
        assert next(verdicts)
    assert package.name not in sys.modules
