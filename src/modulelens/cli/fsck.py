"""`modulelens fsck`: reads every byte of a repo and names what is wrong."""

from __future__ import annotations

import itertools

import msgspec

from modulelens.cli.command import REPO, Command, Reply
from modulelens.cli.progress import progress
from modulelens.cli.repos import open_repo
from modulelens.errors import Corrupted
from modulelens.report.quantity import plural
from modulelens.report.upkeep import fsck_report
from modulelens.store import FsckReport, Problem

_MOST_PROBLEMS = 30


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """How much was checked, how many problems there are, and the first of them."""

    entries: int
    blobs: int
    total: int
    problems: tuple[Problem, ...]


def run(*, repo: str | None) -> Reply:
    """Checks every entry and blob; problems are exit code 1."""
    opened, done = open_repo(repo), itertools.count(1)
    with progress("checking") as advance:
        report: FsckReport = opened.fsck(progress=lambda _: advance(next(done), None))
    total = len(report.problems)
    data = Findings(
        entries=report.entries,
        blobs=report.blobs,
        total=total,
        problems=report.problems[:_MOST_PROBLEMS],
    )
    text = fsck_report(report.problems, entries=report.entries, blobs=report.blobs)
    failure = Corrupted(f"{plural(total, 'problem')} in the repo") if total else None
    return Reply(data, text, failure=failure)


COMMAND = Command(
    run,
    "Check every entry and blob against its digest.",
    "modulelens fsck --json",
    Findings,
    options=(REPO,),
)
