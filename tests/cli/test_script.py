"""A script's model is found among several, or chosen by its class."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

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
