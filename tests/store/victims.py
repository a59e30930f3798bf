"""One change of a repo, and the means to stop the process that makes it at any point.

Knows what each change may leave behind: the entries that it does not name stay as they are.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modulelens as ml

#: What changes files or locks. Writing itself is not among it, nor what SQLite does inside.
_STEPS = frozenset(
    {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link"}
    | {"os.truncate", "sqlite3.connect", "fcntl.flock"}
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class TwoLayers(nn.Module):
    """Two children, a buffer that moves, and weights of `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.second(self.first(rows).relu())


def add(repo: ml.Repo, seed: int, *, name: str = "net", aliases: tuple[str, ...] = ()) -> list[str]:
    """Traces one step of a new model and stores its three modules; the entries' ids."""
    model = TwoLayers(seed)
    with ml.trace(model, name=name) as trace:
        model(torch.full((2, 4), float(seed))).sum().backward()
    return [entry.id for entry in repo.add(trace, verify=False, aliases=aliases)]


def litter(root: Path) -> None:
    """What dead writers leave: a draft, a version without record, a blob of nobody."""
    (root / "tmp" / "draft").write_bytes(b"1234")
    folder = next((root / "entries").iterdir()) / "900"
    folder.mkdir(exist_ok=True)
    (folder / "state.pt").write_bytes(b"12")
    shard = root / "blobs" / "ab"
    shard.mkdir(exist_ok=True)
    (shard / ("ab" + "0" * 62)).write_bytes(b"1")


def newest(repo: ml.Repo) -> ml.Entry:
    """The entry whose turn it is to be changed."""
    return repo["net/first"]


def free(repo: ml.Repo) -> str:
    """The id of an entry to remove: an old one, and none with an alias where there is one."""
    rows = [row for row in repo.rows() if row.id != newest(repo).id]
    return next((row.id for row in reversed(rows) if not row.aliases), rows[0].id)


#: Each change: what it does to a repo, and the ids of the entries that it may alter or remove.
CHANGES: dict[str, tuple[Callable[[ml.Repo, int], Any], Callable[[ml.Repo], set[str]]]] = {
    "add": (lambda repo, n: add(repo, n), lambda _: set()),
    "add with an alias": (lambda repo, n: add(repo, n, aliases=("last",)), lambda _: set()),
    "add another model": (lambda repo, n: add(repo, n, name=f"m{n}"), lambda _: set()),
    "tag": (lambda repo, n: repo.tag(newest(repo), f"t{n}"), lambda repo: {newest(repo).id}),
    "alias": (lambda repo, n: repo.alias(newest(repo), f"a{n % 3}"), lambda _: set()),
    "remove": (lambda repo, _: repo.remove(free(repo), force=True), lambda repo: {free(repo)}),
    "gc": (lambda repo, _: (litter(repo.root), repo.gc()), lambda _: set()),
    "reindex": (lambda repo, _: repo.reindex(), lambda _: set()),
}


def in_repo(root: Path, event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audit event is a step of a change of that repo."""
    if event not in _STEPS or (event == "open" and not (args[2] or 0) & _WRITING):
        return False
    if event == "os.mkdir" and os.path.exists(args[0]):  # noqa: PTH110 - as cheap as can be
        return False
    return event == "fcntl.flock" or any(
        str(root) in os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes, os.PathLike))
    )


class _Stop(threading.local):
    inside = False


_watchers: list[Callable[[str, tuple[Any, ...]], None]] = []
_stop = _Stop()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watchers and event in _STEPS and not _stop.inside:
        _stop.inside = True
        try:
            for watcher in _watchers:
                watcher(event, args)
        finally:
            _stop.inside = False


sys.addaudithook(_audit)


@contextmanager
def at_step(root: Path, number: int, act: Callable[[str], None]) -> Iterator[list[str]]:
    """Calls `act` just before the step of that number, from 1, of all that changes the repo.

    Gives the list of the steps seen so far; 0 is no step at all.
    """
    steps: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if in_repo(root, event, args):
            steps.append(event)
            if len(steps) == number:
                act(event)

    _watchers.append(watch)
    try:
        yield steps
    finally:
        _watchers.remove(watch)


def die(_: str = "") -> None:
    """kill -9 of this very process."""
    os.kill(os.getpid(), signal.SIGKILL)


def entry_files(root: Path) -> dict[str, bytes]:
    """The record and the state of every committed entry, by its id."""
    return {
        f"{path.parent.parent.name}/{path.parent.name}": path.read_bytes()
        + (path.parent / "state.pt").read_bytes()
        for path in (root / "entries").glob("*/*/metadata.json")
    }
