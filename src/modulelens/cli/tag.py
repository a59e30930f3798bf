"""`modulelens tag`: puts tags on an entry."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REF, REPO, Argument, Command, Reply
from modulelens.cli.repos import open_repo, with_repo
from modulelens.report.table import clean


class Tagged(msgspec.Struct, frozen=True, kw_only=True):
    """An entry and all its tags."""

    id: str
    tags: tuple[str, ...]


def run(*, ref: str, tags: list[str], repo: str | None) -> Reply:
    """Adds the tags to those that are there."""
    entry = open_repo(repo).tag(ref, *tags)
    found = entry.metadata.tags
    text = f"{clean(ref)} has the tags {', '.join(map(clean, found))}"
    return Reply(Tagged(id=entry.id, tags=found), text, next=[with_repo(f"show {ref}", repo)])


COMMAND = Command(
    run,
    "Put tags on an entry.",
    "modulelens tag dlrm/over_arch@v2 baseline fp32",
    Tagged,
    arguments=(REF, Argument("tags", "Tags to add.", many=True)),
    options=(REPO,),
)
