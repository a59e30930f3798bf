"""`modulelens diff`: what differs between two entries, by their records."""

from __future__ import annotations

from modulelens.cli.command import REPO, Argument, Command, Reply
from modulelens.cli.repos import open_repo
from modulelens.report.diff import EntryDiff, diff_report


def run(*, old: str, new: str, repo: str | None) -> Reply:
    """Compares class, constructor call, source, calls, environment, grade and speed."""
    opened = open_repo(repo)
    diff = opened[old].diff(opened[new])
    return Reply(diff, diff_report(diff))


COMMAND = Command(
    run,
    "Compare two entries' init, source, calls and grades.",
    "modulelens diff dlrm/over_arch@v1 dlrm/over_arch@v2",
    EntryDiff,
    arguments=(Argument("old", "An entry."), Argument("new", "Another entry.")),
    options=(REPO,),
)
