"""Classes of a training script without a main guard: found again, and the training does not run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import modulelens as ml
from modulelens.errors import ClassNotFound
from modulelens.rebuild import class_of_script

ROOT = Path(__file__).parents[2]
SCRIPT = '''
"""A script as people write them."""
from __future__ import annotations
import enum, sys
from math import *
import torch
from torch import nn
from beside import double
import modulelens as ml
try:
    import not_installed_anywhere as fast
except ImportError:
    fast = None
WIDTH: int = 4
SCALE = sqrt(WIDTH) if fast is None else 0
if WIDTH > 2:
    def act(x): return double(torch.tanh(x))
else:
    act = None

class Mode(enum.Enum):
    ON = 1
    OFF = 2

def helper(x, mode):
    return act(x) * SCALE if mode is Mode.ON else x

class Block(nn.Module):
    class Inner(nn.Linear):
        pass
    def __init__(self, width=WIDTH):
        super().__init__()
        self.lin = Block.Inner(width, width)
        self.mode = Mode.ON
    def forward(self, x, mode):
        assert mode is self.mode, "another enum of the same name"
        return helper(self.lin(x), mode)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
    def forward(self, x):
        for block in self.blocks:
            assert isinstance(block, Block), "another class of the same name"
            x = block(x, Mode.ON)
        return x

with open(sys.argv[1], "a") as log:
    log.write("ran ")
torch.manual_seed(0)
ml.track_init()
model = Net()
with ml.trace(model, name="script", keep=ml.Keep(grads=True)) as trace:
    model(torch.rand(3, WIDTH)).sum().backward()
entries = ml.Repo(sys.argv[2]).add(trace)
print(*[str(e.grade) for e in entries])
'''


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
    folder = tmp_path_factory.mktemp("script")
    script, log, repo = folder / "train.py", folder / "log", folder / "repo"
    script.write_text(SCRIPT)
    (folder / "beside.py").write_text("def double(x): return x * 2\n")
    done = subprocess.run(
        [sys.executable, str(script), str(log), str(repo)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return script, log, repo, done.stdout


def test_every_entry_of_a_script_is_exact(traced: tuple[Path, Path, Path, str]) -> None:
    assert traced[3].split() == ["exact"] * 5


def test_the_script_is_not_run_again_here_or_elsewhere(
    traced: tuple[Path, Path, Path, str], elsewhere: Callable[..., Any]
) -> None:
    _, log, repo, _ = traced
    for entry in ml.Repo(repo):
        assert entry.check(backward=True), entry
        assert elsewhere("check", repo=str(repo), ref=entry.id)["status"] == "EXACT"
    assert log.read_text() == "ran "


def test_classes_of_one_script_know_each_other(traced: tuple[Path, Path, Path, str]) -> None:
    net = ml.Repo(traced[2])["script"].rebuild()
    block = class_of_script(str(traced[0]), "Block")
    assert type(net.blocks[0]) is block
    assert type(net.blocks[0].lin) is block.Inner
    assert net.blocks[0].mode is class_of_script(str(traced[0]), "Mode").ON


def test_a_script_that_changed_drifts_and_one_that_is_gone_is_named(
    traced: tuple[Path, Path, Path, str], tmp_path: Path
) -> None:
    script, _, repo, _ = traced
    entry = ml.Repo(repo)["script/blocks.0"]
    text = script.read_text()
    try:
        script.write_text(
            text.replace("helper(self.lin(x), mode)", "helper(self.lin(x) + 1, mode)")
        )
        check = entry.check()
        assert check.status is ml.Status.MISMATCH_VALUE
        assert any("source of __main__:Block changed" in w for w in check.warnings)
        script.write_text(text.replace("class Block(", "class Renamed("))
        with pytest.raises(ClassNotFound, match="defines no 'Block' any more"):
            entry.rebuild()
        script.write_text(text + "\ndef broken(:\n")
        with pytest.raises(ClassNotFound, match=r"train\.py:\d+: invalid syntax"):
            entry.rebuild()
        script.unlink()
        with pytest.raises(ClassNotFound, match=r"was defined in .*, which is not here") as caught:
            entry.rebuild()
        assert "put the class into a module" in caught.value.hint
    finally:
        script.write_text(text)
    assert entry.check()
