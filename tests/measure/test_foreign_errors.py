"""However a candidate fails, that is a verdict: exits, odd exceptions, texts that cannot be had."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.loop import add_unverified, rows
from tests.measure.test_cheats import Block, tracked
from torch import Tensor, nn

import modulelens as ml
from modulelens.errors import CheckFailed, NotFound, UsageError, text_of
from modulelens.records import Status


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class NoText(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class Own(BaseException):
    pass


ERRORS: dict[str, BaseException] = {
    "SystemExit: 0": SystemExit(0),
    "SystemExit: bye": SystemExit("bye"),
    "GeneratorExit: ": GeneratorExit(),
    "CancelledError: ": asyncio.CancelledError(),
    "Own: mine": Own("mine"),
    "Silent: (its text cannot be had: KeyError)": Silent(),
    "NoText: (its text cannot be had: TypeError)": NoText(),
    "ValueError: half \\udc80 a text": ValueError("half \udc80 a text"),
}


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> ml.Entry:
    model = tracked(Block)
    with ml.trace(model, modules="", keep=ml.Keep(grads=True)) as trace:
        model(rows()).sum().backward()
    return add_unverified(trace, tmp_path_factory.mktemp("errors") / "repo")[0]


class RaisesBackward(torch.autograd.Function):
    error: BaseException

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        raise RaisesBackward.error


@pytest.mark.parametrize("text", ERRORS)
def test_in_this_process_it_is_a_verdict(entry: ml.Entry, text: str) -> None:
    def in_forward(_x: Tensor) -> Tensor:
        raise ERRORS[text]

    check = entry.check(in_forward)
    assert check.status is Status.RUNTIME_ERROR
    assert check.reason.startswith(text)
    with pytest.raises(CheckFailed, match="RUNTIME_ERROR"):
        entry.benchmark(in_forward, budget_s=0.1)


@pytest.mark.parametrize("text", [t for t, e in ERRORS.items() if isinstance(e, Exception)])
def test_in_the_backward_too(entry: ml.Entry, text: str) -> None:
    RaisesBackward.error = ERRORS[text]

    def in_backward(module: Block, x: Tensor) -> Tensor:
        return RaisesBackward.apply(module(x))

    check = entry.check(in_backward, backward=True)
    assert check.status is Status.RUNTIME_ERROR


class Exits(Block):
    def __init__(self) -> None:
        sys.exit("from the constructor")


def test_an_exit_of_a_constructor(entry: ml.Entry) -> None:
    check = entry.check(Exits)
    assert any("from the constructor" in text for text in (check.reason, *check.warnings))


def test_ctrl_c_is_the_users(entry: ml.Entry) -> None:
    def interrupted(_x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        entry.check(interrupted)


ODD = """
class Silent(BaseException):
    def __str__(self):
        raise KeyError
def silent(x):
    raise Silent
def half(x):
    raise OSError("half \\udc80 a text")
def exits(x):
    raise SystemExit(0)
"""


def test_in_a_worker_it_is_the_same_verdict(entry: ml.Entry, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    texts = {"silent": "Silent: (its", "half": "OSError: half \\udc80 a", "exits": "SystemExit: 0"}
    for name, text in texts.items():
        check = entry.check(f"{path}:{name}")
        assert check.status is Status.RUNTIME_ERROR
        assert check.reason.startswith(text)
    path.write_text("raise ValueError('half \\udc80 a text')")
    assert "ValueError: half \\udc80 a text" in entry.check(f"{path}:f").reason


def test_what_an_exception_says() -> None:
    assert text_of(ValueError("a", 1)) == "('a', 1)"
    assert text_of(NotFound("é")) == "é"


@pytest.mark.parametrize("call", ["a", 1.0, True, None])
def test_a_call_that_is_no_number(entry: ml.Entry, call: Any) -> None:
    if call is None:
        assert entry.check(call=call).status is Status.EXACT
    else:
        with pytest.raises(UsageError, match=f"call={call!r}"):
            entry.check(call=call)


@pytest.mark.parametrize("call", [1, -1, 99])
def test_a_call_that_there_is_not(entry: ml.Entry, call: int, tmp_path: Path) -> None:
    for candidate in (None, Block, nn.Identity()):
        with pytest.raises(NotFound, match=f"there is no call {call}"):
            entry.check(candidate, call=call)
    if call == 99:
        path = tmp_path / "fine.py"
        path.write_text("def f(x): return x")
        with pytest.raises(NotFound, match="there is no call 99"):
            entry.check(f"{path}:f", call=call)
