"""`modulelens reindex`: rebuilds the index from the entry files."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REPO, Command, Reply
from modulelens.cli.repos import open_repo
from modulelens.report.quantity import plural


class Reindexed(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries the index holds now."""

    entries: int


def run(*, repo: str | None) -> Reply:
    """Reads every entry's record and writes the index anew."""
    entries = open_repo(repo).reindex()
    return Reply(Reindexed(entries=entries), f"indexed {plural(entries, 'entry')}")


COMMAND = Command(
    run,
    "Rebuild the index from the entry files.",
    "modulelens reindex --repo /data/lens",
    Reindexed,
    options=(REPO,),
)
