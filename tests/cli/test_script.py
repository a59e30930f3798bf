"""A script's model is found among several, or chosen by its class."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.shell import modulelens

from modulelens.cli.script import ScriptOptions, trace_script
from modulelens.errors import ForeignError, NotFound

GAN = """
import torch
from torch import nn

class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Linear(2, 16)

    def forward(self, x):
        return self.grow(x)

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.judge = nn.Linear(16, 1)

    def forward(self, x):
        return self.judge(x)

generator, critic = Generator(), Critic()
for _ in range(3):
    critic(generator(torch.ones(4, 2))).sum().backward()
"""


@pytest.fixture
def gan(tmp_path: Path) -> str:
    path = tmp_path / "gan.py"
    path.write_text(GAN, encoding="utf-8")
    return str(path)


def traced(script: str, **options: Any) -> tuple[str, list[str], list[str]]:
    trace = trace_script(script, [], ScriptOptions(**options))
    return trace.name, [c.fqn for c in trace.captures], trace.warnings


def test_the_largest_model_is_traced_and_the_others_are_named(gan: str) -> None:
    name, fqns, warnings = traced(gan)
    assert (name, fqns) == ("Generator", ["", "grow"])
    assert [w for w in warnings if "--model traces another one: Critic" in w]


def test_another_model_is_chosen_by_its_class(gan: str) -> None:
    assert traced(gan, model="Critic") == ("Critic", ["", "judge"], [])
    with pytest.raises(NotFound, match="no model of class Critc") as caught:
        traced(gan, model="Critc")
    assert caught.value.did_you_mean == ("Critic",)


def test_a_pattern_that_matches_nothing_names_the_other_models(gan: str) -> None:
    with pytest.raises(NotFound, match="'judge' in Generator") as caught:
        traced(gan, modules=("judge",))
    assert "another model of the script: Critic" in caught.value.hint


def test_named_methods_are_recorded(gan: str) -> None:
    text = Path(gan).read_text(encoding="utf-8")
    text = text.replace(
        "return self.judge(x)",
        "return self.rate(x)\n\n    def rate(self, x):\n        return self.judge(x)",
    )
    Path(gan).write_text(text, encoding="utf-8")
    trace = trace_script(gan, [], ScriptOptions(model="Critic", methods=("rate",)))
    assert [call.method for call in trace.captures[0].calls] == ["rate", "forward"]


def test_a_scripts_own_failure_keeps_its_kind_and_the_process_its_handlers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fails.py"
    path.write_text("1 / 0", encoding="utf-8")
    with pytest.raises(ForeignError, match="raised ZeroDivisionError") as caught:
        traced(str(path))
    assert caught.value.kind == "ZeroDivisionError"
    shown = capsys.readouterr().err
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{path}", line 1')
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


LAYER = """
import torch
layer = torch.nn.Linear(2, 2)
def train():
    for _ in range(3):
        layer(torch.ones(1, 2)).sum().backward()
"""
SEEN = """
import json, os, sys
names = ("__file__", "__name__", "__package__", "__spec__", "__doc__")
seen = {name: globals()[name] for name in names}
seen |= {"argv": sys.argv, "path": sys.path[0], "main": vars(sys.modules["__main__"]) is globals()}
seen |= {"loader": type(__loader__).__name__, "builtins": type(__builtins__).__name__}
seen |= {"code": (lambda: 0).__code__.co_filename}
with open(os.environ["SEEN"], "w") as out:
    json.dump(seen, out)
"""


@pytest.mark.parametrize("named", ["./work/train.py", "work/../link.py"])
def test_a_script_sees_of_itself_what_python_shows_it(tmp_path: Path, named: str) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(f'"""Why."""{SEEN}{LAYER}train()\n')
    (tmp_path / "link.py").symlink_to(tmp_path / "work" / "train.py")
    seen = []
    for before in (["-m", "modulelens", "trace", "--no-verify", "--"], []):
        environment = os.environ | {"SEEN": str(tmp_path / "seen")}
        words = [sys.executable, *before, named, "--more", "1"]
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)
        seen.append(json.loads((tmp_path / "seen").read_text()))
    assert seen[0] == seen[1]


def test_a_compiled_script_runs(tmp_path: Path) -> None:
    import py_compile

    (tmp_path / "train.py").write_text(f"{LAYER}train()\n")
    py_compile.compile(str(tmp_path / "train.py"), cfile=str(tmp_path / "train.pyc"))
    done = modulelens("trace", "--no-verify", "--", "train.pyc", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")


def test_a_script_that_goes_elsewhere_is_stored_where_it_began(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{LAYER}import os\nos.mkdir('b')\nos.chdir('b')\ntrain()\n")
    words = ("trace", "--no-verify", "--repo", "lens")
    done = modulelens(*words, "--json", "--", "train.py", cwd=tmp_path)
    assert done.json["data"]["repo"] == str(tmp_path / "lens")
    assert not list((tmp_path / "b").iterdir())
    done = modulelens(*words[:2], "--", "train.py", cwd=tmp_path / "b", MODULELENS_REPO="")
    assert (done.code, list((tmp_path / "b").iterdir())) == (3, []), "no script there"
    (tmp_path / "b").rmdir()
    shown = modulelens(*words[:2], "--", "train.py", cwd=tmp_path, MODULELENS_REPO="")
    assert f"stored 1 entry in {tmp_path / '.modulelens'}: 1 unverified" in shown.out


def test_a_repo_that_cannot_be_is_told_before_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{LAYER}open('ran', 'w')\ntrain()\n")
    done = modulelens("trace", "--repo", "train.py", "--", "train.py", cwd=tmp_path)
    assert (done.code, "is a file, not a repo" in done.err) == (1, True)
    assert not (tmp_path / "ran").exists()


STREAMS = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "detached": "sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')",
    "redirected": "os.dup2(os.open('log', os.O_WRONLY | os.O_CREAT), 1); print('logged')",
    "closed below": "os.close(1); os.close(2)",
}


@pytest.mark.parametrize("way", STREAMS)
def test_the_answer_comes_whatever_a_script_did_to_its_streams(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(f"{LAYER}import io, os, sys\ntrain()\n{STREAMS[way]}\n")
    done = modulelens("trace", "--no-verify", "--", "train.py", cwd=tmp_path)
    assert (done.code, "stored 1 entry in" in done.out, done.err) == (0, True, "")
    if way == "redirected":
        assert (tmp_path / "log").read_text() == "logged\n"


@pytest.mark.parametrize("end", ["", "1 / 0\n"])
def test_the_envelope_comes_whatever_a_script_did_to_its_streams(tmp_path: Path, end: str) -> None:
    script = (
        f"{LAYER}import os, sys\n{STREAMS['closed']}\n{end}train()\n{STREAMS['closed below']}\n"
    )
    (tmp_path / "train.py").write_text(script)
    done = modulelens("trace", "--no-verify", "--json", "--", "train.py", cwd=tmp_path)
    assert (done.code, done.json["ok"]) == ((4, False) if end else (0, True))
    assert ("ZeroDivisionError: division by zero" in done.err) == bool(end)


HARD = """
import os, sys
child = os.fork()
if child == 0:
    os._exit(0)  # not the script's end
os.waitpid(child, 0)
train()
print("trained")
os._exit(3)
"""


def test_a_script_that_leaves_hard_leaves_its_trace(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{LAYER}{HARD}")
    done = modulelens("trace", "--warmup", "0", "--", "train.py", cwd=tmp_path)
    assert done.code == 3
    assert "trained" in done.out
    assert "stored" in done.out
    assert modulelens("ls", cwd=tmp_path).out.count("@v1") >= 1
