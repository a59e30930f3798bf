"""`modulelens demo`: the whole loop on a small ranking model, as a user would type it.

Trains and traces here; every command after that runs in a process of its own, on what is on disk.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from modulelens.cli.command import Command, Option, Reply
from modulelens.cli.progress import progress
from modulelens.errors import CheckFailed, UsageError
from modulelens.report.coverage import coverage_report
from modulelens.report.table import indent

ENTRY = "ranking/interaction"
_MODEL = Path(__file__).with_name("demo_model.py")
_SCALE = " * self.scale"
_FUSED = '''"""A faster Interaction: one batched matrix product in place of a loop over pairs."""

import torch
from torch import nn


class Interaction(nn.Module):
    def __init__(self, dim, dropout=0.1):
        super().__init__()
        self.scale = dim**-0.5
        self.dropout = nn.Dropout(dropout)

    def forward(self, features):
        first, second = torch.triu_indices(features.shape[1], features.shape[1], 1)
        dots = torch.bmm(features, features.transpose(1, 2))[:, first, second] * self.scale
        return torch.cat([features[:, 0], self.dropout(dots)], dim=1)
'''


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what was typed, how it ended, what it printed."""

    title: str
    command: str
    exit_code: int
    output: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All steps; `folder` exists afterwards where it was named by `--keep-dir`."""

    folder: str
    steps: tuple[Step, ...]


def run(*, keep_dir: str | None) -> Reply:
    """Runs the loop; a step that does not end as it should is exit code 4."""
    with _folder(keep_dir) as folder, progress("demo") as advance:
        steps = [_trace_one_step(folder)]
        failure = None
        for done, (title, words, code, begin) in enumerate(_COMMANDS, start=1):
            advance(done, len(_COMMANDS) + 1)
            step = _type(folder, title, words)
            steps.append(step)
            if step.exit_code != code or not step.output.startswith(begin):
                message = f"`{step.command}` should end with {code} and {begin or 'a report'}"
                failure = CheckFailed(message, hint="modulelens doctor")
                break
    story = Story(folder=str(folder) if keep_dir else "", steps=tuple(steps))
    return Reply(story, _report(story), next=["modulelens trace -- train.py"], failure=failure)


# Title, words, exit code, and what the output has to begin with.
_COMMANDS: tuple[tuple[str, tuple[str, ...], int, str], ...] = (
    ("What was captured, read without importing torch", ("show", ENTRY), 0, ENTRY),
    (
        "Rebuilt alone in another process, gradients included",
        ("check", ENTRY, "--backward"),
        0,
        "EXACT",
    ),
    (
        "An edit that forgets the scale is caught",
        ("check", ENTRY, "edited.py:Interaction"),
        4,
        "MISMATCH_VALUE",
    ),
    (
        "A batched rewrite beside the original",
        ("bench", ENTRY, "fused.py:Interaction", "--budget", "4"),
        0,
        "",
    ),
    ("Where its time goes", ("profile", ENTRY, "--limit", "6"), 0, ""),
)


@contextlib.contextmanager
def _folder(keep_dir: str | None) -> Iterator[Path]:
    if keep_dir is None:
        with tempfile.TemporaryDirectory(prefix="modulelens-demo-") as path:
            yield Path(path)
        return
    folder = Path(keep_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--keep-dir {keep_dir} exists and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _trace_one_step(folder: Path) -> Step:
    source = _MODEL.read_text(encoding="utf-8")
    (folder / "ranking.py").write_text(source, encoding="utf-8")
    (folder / "edited.py").write_text(source.replace(_SCALE, ""), encoding="utf-8")
    (folder / "fused.py").write_text(_FUSED, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        text = _train(folder / "repo", importlib.import_module("ranking").RankingModel)
    finally:
        sys.path.remove(str(folder))
    return Step(
        title="A ranking model trains five steps; the last one is traced",
        command='with ml.trace(model, name="ranking", warmup=4, keep=ml.Keep(grads=True)): ...',
        exit_code=0,
        output=text,
    )


def _train(place: Path, model_class: Callable[[], object]) -> str:
    import torch

    import modulelens as ml

    torch.manual_seed(0)
    with ml.track_init():
        model = model_class()
    assert isinstance(model, torch.nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    with ml.trace(model, name="ranking", warmup=4, keep=ml.Keep(grads=True)) as trace:
        while not trace.done and len(losses) < 10:
            dense, ids = torch.randn(128, 13), torch.randint(5000, (8, 128, 4))
            clicks = torch.randint(2, (128,)).float()
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, ids), clicks)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    entries = ml.Repo(str(place)).add(trace)
    grades = [str(entry.grade) for entry in entries]
    counts = ", ".join(f"{grades.count(grade)} {grade}" for grade in dict.fromkeys(grades))
    curve = " ".join(f"{loss:.4f}" for loss in losses)
    return (
        f"loss {curve}\n{coverage_report(trace.coverage, limit=4)}\nstored and verified: {counts}"
    )


def _type(folder: Path, title: str, words: tuple[str, ...]) -> Step:
    done = subprocess.run(
        [sys.executable, "-m", "modulelens", *words, "--repo", "repo"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return Step(
        title=title,
        command=" ".join(["modulelens", *words]),
        exit_code=done.returncode,
        output=(done.stdout + (done.stderr if done.returncode not in (0, 4) else "")).rstrip(),
    )


def _report(story: Story) -> str:
    parts = [
        f"{number}. {step.title}\n   $ {step.command}\n{indent(step.output, 5)}"
        for number, step in enumerate(story.steps, start=1)
    ]
    if story.folder:
        parts.append(f"kept in {story.folder}: ranking.py, edited.py, fused.py, repo/")
    else:
        parts.append("`modulelens demo --keep-dir DIR` keeps the files to play with.")
    return "\n\n".join(parts)


COMMAND = Command(
    run,
    "Run the whole loop on a small ranking model.",
    "modulelens demo --keep-dir lens-demo",
    Story,
    options=(Option("--keep-dir", str, "Work in this folder and keep it.", metavar="DIR"),),
)
