"""The loop through the command line: trace a script, look, check, edit, measure, keep house."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.shell import Done, modulelens
from tests.cli.test_output import BOXES, assert_fits_schema

MODEL = """
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self, dim, p=0.2):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(p)

    def forward(self, x, *, scale=2.0):
        return self.dropout(torch.sigmoid(self.linear(x))) * x * scale

class Tower(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.gate = Gate(dim)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        return self.head(self.gate(x, scale=0.5))
"""
TRAIN = """
import sys
import torch
from tower import Tower

def main():
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    print("finished", *sys.argv[1:])

if __name__ == "__main__":
    main()
"""
FORGETS_SCALE = """
import torch
from tower import Gate

class Edited(Gate):
    def forward(self, x, *, scale=2.0):
        return self.dropout(torch.sigmoid(self.linear(x))) * x
"""
REARRANGED = """
import torch
from tower import Gate

class Edited(Gate):
    def forward(self, x, *, scale=2.0):
        return self.dropout(torch.sigmoid(self.linear(x))) * (x * scale)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training script that was traced once."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in {
        "tower.py": MODEL,
        "train.py": TRAIN,
        "wrong.py": FORGETS_SCALE,
        "right.py": REARRANGED,
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    words = ["trace", "--name", "tower", "--grads", "--repo", "lens", "--json", "--", "train.py"]
    traced = modulelens(*words, "--epochs", "3", cwd=folder)
    assert traced.code == 0, traced.err
    assert_fits_schema("trace", traced.out)
    assert "finished --epochs 3" in traced.err
    data = traced.json["data"]
    assert data["stored"] == 5
    assert data["grades"] == {"exact": 5}
    assert [missed["fqn"] for missed in data["missed"]] == ["unused"]
    return folder


def lens(project: Path, *words: str) -> Done:
    done = modulelens(*words, "--repo", "lens", cwd=project)
    assert not BOXES & set(done.out + done.err)
    assert "\x1b" not in done.out + done.err
    return done


def answer(project: Path, *words: str, code: int = 0) -> dict[str, object]:
    done = lens(project, *words, "--json")
    assert done.code == code, done
    assert len(done.out) < 8_000
    assert_fits_schema(words[0], done.out)
    data = done.json["data"]
    assert isinstance(data, dict)
    return data


def test_what_was_traced_is_listed_and_shown(project: Path) -> None:
    assert "tower/gate@v1" in lens(project, "ls").out
    page = lens(project, "show", "tower/gate").out
    assert "Gate(16)" in page
    assert "(float32[8,16], scale=0.5) -> float32[8,16]" in page
    assert "exact (by " in page
    assert "class Gate(nn.Module):" in lens(project, "show", "tower/gate", "--source").out


def test_a_rebuild_is_exact_and_an_edit_is_caught(project: Path) -> None:
    assert answer(project, "check", "tower/gate", "--backward")["status"] == "EXACT"
    data = answer(project, "check", "tower/gate", "wrong.py:Edited", code=4)
    assert data["status"] == "MISMATCH_VALUE"


def test_a_broken_or_missing_candidate_is_named(project: Path) -> None:
    (project / "typo.py").write_text("def f(:\n", encoding="utf-8")
    assert lens(project, "check", "tower/gate", "typo.py:f").code == 4
    missing = lens(project, "check", "tower/gate", "right.py:Editd", "--json")
    assert missing.code == 3
    assert "Editd" in missing.json["error"]["message"]


def test_the_original_and_a_candidate_are_measured(project: Path) -> None:
    words = ["bench", "tower/gate", "right.py:Edited", "--budget", "0.3", "--out", "times.json"]
    data = answer(project, *words, "--fail-below", "1000", code=4)
    assert data["verdict"] in ("faster", "slower", "undecided")
    assert data["correct"] in ("EXACT", "CLOSE")
    assert data["original"]["median_s"] > 0  # type: ignore[index]
    assert (project / "times.json").stat().st_size > 0


def test_a_wrong_candidate_is_measured_and_fails(project: Path) -> None:
    data = answer(project, "bench", "tower/gate", "wrong.py:Edited", "--budget", "0.1", code=4)
    assert data["correct"] == "MISMATCH_VALUE"
    assert data["speedup"]
    assert lens(project, "bench", "tower/gate", "--budget", "0").code == 2


def test_a_candidate_imports_the_captured_package_from_anywhere(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "right.py").write_text(REARRANGED, encoding="utf-8")
    words = ["tower/gate", "right.py:Edited", "--repo", str(project / "lens")]
    assert modulelens("check", *words, cwd=tmp_path).code == 0
    done = modulelens("bench", *words, "--budget", "0.1", cwd=tmp_path)
    assert done.code == 0, done


def test_a_profile_names_operators(project: Path) -> None:
    data = answer(project, "profile", "tower/gate", "--trace-file", "trace.json")
    assert data["flops_forward"] >= 2 * 8 * 16 * 16  # type: ignore[operator]
    assert (project / "trace.json").stat().st_size > 0


def test_an_export_opens_without_modulelens(project: Path) -> None:
    assert answer(project, "export", "tower/gate", "gate.pt")["bytes"]
    code = "import torch; torch.load('gate.pt', weights_only=True, mmap=True)"
    subprocess.run([sys.executable, "-c", code], cwd=project, check=True)


def test_house_is_kept(project: Path) -> None:
    assert answer(project, "fsck")["total"] == 0
    assert answer(project, "gc")["removed_blobs"] == 0
    assert answer(project, "reindex")["entries"] == 5


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def fail():\n    raise RuntimeError('no data')\nfail()", "RuntimeError: no data"),
        ("x = 1\ndef f(:\n", "SyntaxError"),
    ],
)
def test_a_script_that_fails_is_told_as_python_would(project: Path, code: str, says: str) -> None:
    (project / "fails.py").write_text(code, encoding="utf-8")
    done = lens(project, "trace", "--json", "--", "fails.py")
    assert done.code == 4
    assert done.json["error"]["code"] == "FOREIGN_ERROR"
    assert says in done.err
    assert 'fails.py", line 2' in done.err
    assert "modulelens" not in done.err
    assert "runpy" not in done.err


def test_a_terminated_script_leaves_its_trace(project: Path) -> None:
    kill = (
        "    import os, signal, time\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)"
    )
    text = TRAIN.replace('    print("finished", *sys.argv[1:])', kill)
    (project / "killed.py").write_text(text, encoding="utf-8")
    words = ["trace", "--no-verify", "--repo", "killed", "--json", "--", "killed.py"]
    done = modulelens(*words, cwd=project)
    assert done.code == 0, done.err
    assert done.json["data"]["stored"] == 5
    assert "ended by SystemExit" in done.json["warnings"][-1]


@pytest.mark.slow
def test_the_demo_tells_its_story(tmp_path: Path) -> None:
    done = modulelens("demo", "--keep-dir", str(tmp_path / "demo"), "--json")
    assert done.code == 0, done
    assert_fits_schema("demo", done.out)
    outputs = [step["output"] for step in done.json["data"]["steps"]]
    assert "recorded" in outputs[0]
    assert outputs[2].startswith("EXACT")
    assert outputs[3].startswith("MISMATCH_VALUE")
    assert "output: max abs error" in outputs[3]
    assert "the original's speed" in outputs[4]
    assert "correctness: CLOSE" in outputs[4]
    assert "OPERATOR" in outputs[5]
    again = modulelens("ls", "--repo", "repo", "--json", cwd=tmp_path / "demo")
    assert again.json["data"]["total"] == 20
