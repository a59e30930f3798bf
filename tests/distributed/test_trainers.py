"""Trainers and loops that people have: the step is the model's own call, whoever makes it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.launch import ROOT, launch
from tests.distributed.models import MLP
from torch import nn

import modulelens as ml

WIDTH = 8


def modulelens(*words: str | Path) -> str:
    """What a command line prints; fails the test when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "modulelens", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_lightnings_trainer_by_the_example(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    words = ("--warmup", "3", "--grads", "--repo", tmp_path / "repo")
    assert "7 exact" in modulelens("trace", *words, "--", "examples/lightning.py")
    check = modulelens("check", "Classifier/body.0", "--repo", tmp_path / "repo")
    assert "EXACT" in check


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("example", "modules", "whole"),
    [
        ("fsdp2_llama", "model.layers.0.mlp*", {}),
        ("tp_mlp", "*", {"": "close", "up": "exact"}),
        ("dlrm_dmp", "*", {"": "exact", "tables": "exact"}),
    ],
)
def test_examples_run_as_their_text_says(
    example: str, modules: str, whole: dict[str, str], tmp_path: Path
) -> None:
    if example == "dlrm_dmp":
        pytest.importorskip("fbgemm_gpu", reason="torchrec needs fbgemm-gpu-cpu")
    words = ("-m", "modulelens", "trace", "--ranks", "all", "--repo", tmp_path / "repo")
    printed = launch(2, *words, "--modules", modules, "--", f"examples/{example}.py")
    assert "step 3: loss" in printed
    entries = ml.Repo(tmp_path / "repo").find()
    merged = {e.fqn: str(e.grade) for e in entries if e.metadata.merged}
    assert {fqn: merged.get(fqn) for fqn in whole} == whole
    if not whole:
        assert not merged
        assert {str(e.grade) for e in entries} == {"exact"}


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator)


def accelerated(model: nn.Module, trace: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with trace:
        for batch in batches(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()


def accumulating(model: nn.Module, trace: Any) -> None:
    """Several backwards, each of its own forward, before one step of the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace:
        for number, batch in enumerate(batches(6)):
            (model(batch).square().mean() / 3).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()


def scaling(model: nn.Module, trace: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with trace:
        for batch in batches(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def closing(model: nn.Module, trace: Any) -> None:
    """The optimizer itself calls the model, as LBFGS does, more than once per step."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    batch = next(batches(1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with trace:
        for _ in range(2):
            optimizer.step(closure)


LOOPS = [accelerated, accumulating, scaling, closing]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_any_kind_has_exact_calls_and_gradients(
    loop: Callable[..., None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, plain = MLP(WIDTH, 16), MLP(WIDTH, 16)
    plain.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainers' own
        loop(plain, torch.enable_grad())
        trace = ml.trace(model, name="m", warmup=2, steps=2, keep=ml.Keep(grads=True))
        loop(model, trace)
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.equal(two)
    entries = ml.Repo(tmp_path / "repo").add(trace)
    assert [len(e.metadata.calls) for e in entries] == [2, 2, 2]
    assert {str(e.grade) for e in entries} == {"exact"}
    assert {str(e.grade.param_grads) for e in entries if e.grade} <= {"exact", "close"}
    assert all(e.grads()["parameters"] for e in entries)


JOB = ROOT / "tests" / "distributed" / "loops.py"
PIPELINES = ("all_then_all", "one_by_one")


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looped")
    there = {"accelerated": "accelerate", "lightning": "pytorch_lightning"}
    ways = [way for way, package in there.items() if importlib.util.find_spec(package)]
    launch(2, JOB, folder, *PIPELINES, *ways)
    return folder


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("way", "calls", "wrapped"),
    [
        *((way, 3, "") for way in PIPELINES),
        ("accelerated", 2, "module"),
        ("lightning", 1, ""),
    ],
)
def test_trainers_and_pipelines_of_two_ranks(
    looped: Path, way: str, calls: int, wrapped: str
) -> None:
    if not (looped / way).exists():
        pytest.skip("its package is not installed")
    told = [json.loads((looped / f"{way}.{rank}.json").read_text()) for rank in (0, 1)]
    assert all(each["plain"] == each["traced"] for each in told)
    assert not any(each["warnings"] for each in told)
    repo = ml.Repo(looped / way)
    # The task itself holds its trainer. Of a pipeline's stages some modules are enough here.
    fqns = ["body", "body.up", "body.down"] if way == "lightning" else ["", "up", "down", "block"]
    repo.verify(repo.find({"fqn": {"$in": fqns}}))
    assert not torch.distributed.is_initialized()
    graded = [e for e in repo.find() if e.grade]
    assert len(graded) == 2 * (2 if way in PIPELINES else 3)
    assert {str(e.grade) for e in graded} == {"exact"}
    assert {len(e.metadata.calls) for e in graded} == {calls}
    # The gradients of several calls are added up in another order.
    assert {str(e.grade.param_grads) for e in graded if e.grade} <= {"exact", "close"}
    first = min(graded, key=lambda e: len(e.fqn))
    assert first.metadata.wrapped_fqn == wrapped
    assert first.grads()["parameters"]
