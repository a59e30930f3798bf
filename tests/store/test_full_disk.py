"""A disk that is full at any step: a named error, nothing half stays, and all goes on after it."""

from __future__ import annotations

import errno
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.store.samples import run
from tests.store.test_kills import assert_sound, assert_usable, change
from tests.store.test_kills import sample as sample
from tests.store.victims import CHANGES, TwoLayers, at_step, entry_files

import modulelens as ml
from modulelens.errors import DiskFull

NEEDS_SPACE = ("open", "os.mkdir", "os.rename")


def refuse(event: str) -> None:
    if event in NEEDS_SPACE:  # threads may take their steps in another order than before
        raise OSError(errno.ENOSPC, "No space left on device")


Send = Callable[[object], None]


def assert_refused(
    lines: list[str], root: Path, before: dict[str, bytes], touched: set[str], what: str
) -> None:
    """It was said or it did no harm; nothing that was there is gone, nothing half is there."""
    assert lines, what
    if lines[0] != "done":
        assert lines[0] == "DISK_FULL", (what, lines)
        assert str(root) in lines[1], what
        assert "bytes" in lines[1], what
    assert_sound(root, before, touched, what)
    assert {path.name for path in (root / "tmp").iterdir()} <= {"draft"}, what  # was there before
    assert_usable(root, what)


def attempt(send: Send, work: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an index that is behind is a warning
        try:
            work()
        except DiskFull as error:
            send(error.code)
            send(error.message.replace("\n", " "))
        else:
            send("done")


@pytest.mark.parametrize("name", ["add with an alias", "tag", "alias"])
def test_no_space_at_any_step_of_a_change(sample: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(sample, tmp_path / "whole")
    with at_step(tmp_path / "whole", 0, refuse) as steps:
        change(tmp_path / "whole", name, 5)
    before, touched = entry_files(sample), CHANGES[name][1](ml.Repo(sample))
    for number, event in enumerate(steps, 1):
        if event not in NEEDS_SPACE:
            continue
        root = tmp_path / f"step-{number}"
        shutil.copytree(sample, root)

        def work(send: Send, root: Path = root, number: int = number) -> None:
            with at_step(root, number, refuse):
                attempt(send, lambda: change(root, name, 5))

        assert_refused(run(work), root, before, touched, f"{name}, step {number}, {event}")
        shutil.rmtree(root)


def test_no_space_while_a_repo_is_made(tmp_path: Path) -> None:
    with at_step(tmp_path / "whole", 0, refuse) as steps:
        change(tmp_path / "whole", "add", 5)
    for number, event in enumerate(steps, 1):
        if event not in NEEDS_SPACE:
            continue
        root = tmp_path / f"step-{number}"

        def work(send: Send, root: Path = root, number: int = number) -> None:
            with at_step(root, number, refuse):
                attempt(send, lambda: change(root, "add", 5))

        lines = run(work)
        assert lines[0] in ("done", "DISK_FULL"), (number, lines)
        assert_sound(root, {}, set(), f"step {number}, {event}")
        if number % 4 == 0:
            assert_usable(root, f"step {number}, {event}")
        shutil.rmtree(root)


def test_training_goes_on_and_the_message_names_what_is_lost(tmp_path: Path) -> None:
    def work(send: Send) -> None:
        model = TwoLayers(1)
        repo = ml.Repo(tmp_path / "repo")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with ml.trace(model, name="net") as trace:
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))
                attempt(send, lambda trace=trace: repo.add(trace, verify=False))
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            else:
                repo.add(trace, verify=False)
        send(int(model.count))

    code, message, steps = run(work)
    assert (code, steps) == ("DISK_FULL", "3")
    assert "no space left on" in message
    assert "net" in message
    assert "bytes needed" in message
    repo = ml.Repo(tmp_path / "repo")
    assert repo.fsck().ok
    assert {row.name for row in repo.rows()} == {"net", "net/first", "net/second"}
    assert {version for row in repo.rows() for version in [row.version]} <= {1, 2, 3}


def test_every_size_limit(sample: Path, tmp_path: Path) -> None:
    before = entry_files(sample)
    for limit in (1, 30, 80, 300, 600, 1000, 1500, 2500, 5000, 9000, 20_000):
        root = tmp_path / str(limit)
        shutil.copytree(sample, root)

        def work(send: Send, root: Path = root, limit: int = limit) -> None:
            unlimited = resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
            attempt(send, lambda: change(root, "add", 5))
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

        assert_refused(run(work), root, before, set(), f"limit {limit}")
