"""`modulelens fsck`: reads every byte of a repo and names what is wrong."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REPO, Command, Reply
from modulelens.cli.repos import open_repo, with_repo
from modulelens.errors import Corrupted
from modulelens.report.quantity import plural
from modulelens.report.upkeep import fsck_report

_MOST_FINDINGS = 50


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. `where` is an entry id, a blob or a file."""

    where: str
    code: str
    message: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The first problems, and how many there are."""

    total: int
    problems: tuple[Finding, ...]


def run(*, repo: str | None) -> Reply:
    """Checks every entry and blob; problems are exit code 1."""
    problems = open_repo(repo).fsck().problems
    found = tuple(Finding(where=p.where, code=p.code, message=p.message) for p in problems)
    data = Findings(total=len(found), problems=found[:_MOST_FINDINGS])
    failure = None
    if found:
        failure = Corrupted(
            f"{plural(len(found), 'problem')} in the repo", hint=with_repo("fsck", repo)
        )
    return Reply(data, fsck_report(found), failure=failure)


COMMAND = Command(
    run,
    "Check every entry and blob against its digest.",
    "modulelens fsck --json",
    Findings,
    options=(REPO,),
)
