"""kill -9 anywhere: earlier entries stay, no half entry shows, the next writer works at once.

`MODULELENS_KILLS=5000 pytest tests/store/test_kills.py --timeout 0` kills for longer.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from tests.store.samples import Child
from tests.store.victims import (
    CHANGES,
    add,
    at_step,
    die,
    entry_files,
    litter,
)

import modulelens as ml

KILLS = int(os.environ.get("MODULELENS_KILLS", "200"))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repo with two versions of three modules, an alias, and leftovers; never changed."""
    repo = ml.Repo(tmp_path_factory.mktemp("sample") / "repo")
    for seed in (1, 2):
        add(repo, seed, aliases=("good",))
    repo._store.close()
    litter(repo.root)
    return repo.root


def change(root: Path, name: str, number: int) -> None:
    CHANGES[name][0](ml.Repo(root), number)


def assert_sound(root: Path, before: dict[str, bytes], touched: set[str], what: str) -> None:
    """All that has to hold after any change, whole or cut off."""
    after = entry_files(root)
    for entry_id, data in before.items():
        if entry_id not in touched:
            assert after.get(entry_id) == data, f"{what}: {entry_id}"
    repo = ml.Repo(root)
    rows = repo.rows()
    assert {row.id for row in rows} == set(after), what
    assert {entry.id for entry in repo.find()} == set(after), what
    for row in rows:
        assert repo[f"{row.name}@v{row.version}"].id == row.id
    report = repo.fsck()
    assert report.ok, (what, report.problems)
    assert report.entries == len(after)


def assert_usable(root: Path, what: str) -> None:
    """A new writer works at once, and gc cleans all that the dead one left."""
    repo = ml.Repo(root)
    started = time.monotonic()
    fresh = add(repo, 77, aliases=("fresh",))
    assert time.monotonic() - started < 5, what
    assert repo["net@fresh"].id in fresh, what
    repo.gc()
    assert not any((root / "tmp").iterdir()), what
    assert not any((root / "changes").iterdir()), what
    for folder in (root / "entries").glob("*/*/"):
        assert {path.name for path in folder.iterdir()} == {"metadata.json", "state.pt"}, what
    needed = {digest for entry in repo.find() for digest in entry.metadata.blobs}
    assert {path.name for path in (root / "blobs").glob("*/*")} == needed, what
    assert repo.fsck().ok, what


def steps_of(root: Path, name: str, number: int) -> int:
    with at_step(root, 0, die) as steps:
        change(root, name, number)
    return len(steps)


@pytest.mark.parametrize("name", [name for name in CHANGES if name[:3] != "add" or "alias" in name])
def test_a_kill_at_every_step_of_a_change(sample: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(sample, tmp_path / "whole")
    total = steps_of(tmp_path / "whole", name, 5)
    assert total > 5
    before, touched = entry_files(sample), CHANGES[name][1](ml.Repo(sample))
    for step in range(1, total + 1):
        root = tmp_path / f"step-{step}"
        shutil.copytree(sample, root)

        def work(_: object, root: Path = root, step: int = step) -> None:
            with at_step(root, step, die):
                change(root, name, 5)

        status, _ = Child(work).wait()
        assert status in (-9, 0)  # threads may take their steps in another order
        what = f"{name}, step {step} of {total}"
        assert_sound(root, before, touched, what)
        assert_usable(root, what)
        shutil.rmtree(root)


def test_a_kill_at_every_step_of_making_a_repo(tmp_path: Path) -> None:
    total = steps_of(tmp_path / "whole", "add", 5)
    for step in range(1, total + 1):
        root = tmp_path / f"step-{step}"

        def work(_: object, root: Path = root, step: int = step) -> None:
            with at_step(root, step, die):
                change(root, "add", 5)

        assert Child(work).wait()[0] in (-9, 0)
        assert_sound(root, {}, set(), f"step {step} of {total}")
        assert_usable(root, f"step {step} of {total}")
        shutil.rmtree(root)


def test_kills_at_random_moments(sample: Path, tmp_path: Path) -> None:
    root = tmp_path / "repo"
    shutil.copytree(sample, root)
    rng = random.Random(11)
    durations: dict[str, float] = {}
    kills = number = 0
    while kills < KILLS:
        number += 1
        name = rng.choice(list(CHANGES)) if len(ml.Repo(root)) > 2 else "add"
        before, touched = entry_files(root), CHANGES[name][1](ml.Repo(root))

        def work(send: object, name: str = name, number: int = number) -> None:
            started = time.monotonic()
            send("ready")  # type: ignore[operator]
            change(root, name, number)
            send(time.monotonic() - started)  # type: ignore[operator]

        child = Child(work)
        assert child.line() == "ready"
        if name in durations:
            time.sleep(rng.random() * durations[name])
            child.kill()
        status, lines = child.wait()
        if lines:  # it ended before it was killed
            durations[name] = float(lines[0])
        kills += status == -9 and not lines
        assert_sound(root, before, touched, f"{name}, kill {kills}")
        if number % 20 == 0:
            assert_usable(root, f"{name}, kill {kills}")
            thin_out(root)
    assert_usable(root, "the end")


def thin_out(root: Path) -> None:
    """Keeps the repo small enough that looking at all of it stays quick."""
    repo = ml.Repo(root)
    for row in repo.rows():
        if row.model != "net" or row.id not in [e.id for e in repo.versions(row.name)[:3]]:
            repo.remove(row.id, force=True)
    repo.gc()


def test_four_processes_add_while_another_lists(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    ml.Repo(root)
    each = 50

    def write(send: object, first: int) -> None:
        repo = ml.Repo(root)
        for number in range(each):
            for entry_id in add(repo, first + number):
                send(entry_id)  # type: ignore[operator]

    def read(send: object) -> None:
        repo, seen = ml.Repo(root), set[str]()
        while len(seen) < 4 * each * 3:
            ids = {row.id for row in repo.rows()}
            assert seen <= ids
            new = list(ids - seen)
            for entry_id in new[:5]:
                assert repo[entry_id].id == entry_id
            seen = ids
        send(len(seen))  # type: ignore[operator]

    reader = Child(read)
    writers = [Child(lambda send, n=n: write(send, n * each)) for n in range(4)]
    stored: list[str] = []
    for writer in writers:
        status, lines = writer.wait()
        assert status == 0
        stored += lines
    assert len(set(stored)) == len(stored) == 4 * each * 3
    assert reader.wait() == (0, [str(len(stored))])
    repo = ml.Repo(root)
    assert {row.id for row in repo.rows()} == set(stored)
    assert {row.version for row in repo.rows({"fqn": "first"})} == set(range(1, 4 * each + 1))
    assert repo.fsck().ok
