"""A candidate is found by file and name, run anew each time, and its faults are named."""

from __future__ import annotations

import inspect
import sys

import pytest
from torch import nn

from modulelens.errors import CandidateBroken, NotFound, UsageError
from modulelens.measure.candidate import load_candidate

SOURCE = """
import torch
from sibling_of_candidate import SCALE

class Faster(torch.nn.Module):
    def forward(self, x):
        from lazy_sibling_of_candidate import ONE
        return x * SCALE + ONE

class Outer:
    class Inner(torch.nn.Module):
        pass

def function(x):
    return x

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "sibling_of_candidate.py").write_text("SCALE = 2")
    (tmp_path / "lazy_sibling_of_candidate.py").write_text("ONE = 1")
    path = tmp_path / "fast.py"
    path.write_text(SOURCE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    for name in ("sibling_of_candidate", "lazy_sibling_of_candidate"):
        sys.modules.pop(name, None)


def test_what_is_no_name_stays_as_it_is():
    module = nn.Linear(1, 1)
    assert load_candidate(module) is module
    assert load_candidate(len) is len


def test_a_class_is_found_with_its_imports(file):
    found = load_candidate(f"{file}:Faster")
    assert issubclass(found, nn.Module)
    assert found()(3) == 7
    assert "SCALE" in inspect.getsource(found)
    assert load_candidate(f"{file}:function")(1) == 1
    assert load_candidate(f"{file}:Outer.Inner").__qualname__ == "Outer.Inner"
    assert sys.path[0] != str(file.parent)


def test_an_edit_is_seen_however_soon(file):
    for value in (1, 2, 3):
        file.write_text(f"def f(): return {value}")
        assert load_candidate(f"{file}:f")() == value


def test_a_relative_path(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load_candidate("fast.py:function")(5) == 5


@pytest.mark.parametrize("text", ["fast.py", "fast.py:", "a b", "x.py:not a name"])
def test_a_malformed_name_is_refused(text):
    with pytest.raises(UsageError, match=r"path/file\.py:Name"):
        load_candidate(text)


def test_near_names_are_proposed(file):
    with pytest.raises(NotFound) as caught:
        load_candidate(f"{file}:faster")
    assert caught.value.did_you_mean[0] == "Faster"
    with pytest.raises(NotFound) as caught:
        load_candidate(f"{file.parent}/fsat.py:Faster")
    assert "fast.py" in caught.value.did_you_mean
    with pytest.raises(UsageError, match="int"):
        load_candidate(f"{file}:number")


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("x = 1\ndef f(:\n    pass\n", 2, "SyntaxError"),
        ("x = 1\n\nimport no_such_package_at_all\n", 3, "no_such_package_at_all"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "division by zero"),
        ("import sys\nsys.exit(0)\n", 2, "SystemExit"),
    ],
)
def test_a_broken_file_is_named_with_its_line(file, source, line, words):
    file.write_text(source)
    with pytest.raises(CandidateBroken, match=words) as caught:
        load_candidate(f"{file}:f")
    assert caught.value.line == line
    assert f"fast.py:{line}:" in caught.value.message
    assert not any(
        str(file) == getattr(module, "__file__", None) for module in list(sys.modules.values())
    )
