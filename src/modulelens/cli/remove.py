"""`modulelens remove`: removes one version of an entry; its bytes go with the next gc."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REF, REPO, Command, Option, Reply
from modulelens.cli.repos import open_repo, with_repo
from modulelens.report.table import clean


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """The id of the entry that is gone, and what it was called."""

    id: str
    name: str


def run(*, ref: str, repo: str | None, force: bool) -> Reply:
    """Removes the entry, also one that cannot be read."""
    entry_id = open_repo(repo).remove(ref, force=force)
    text = f"removed {clean(ref)} ({entry_id})"
    return Reply(Removed(id=entry_id, name=ref), text, next=[with_repo("gc", repo)])


COMMAND = Command(
    run,
    "Remove one version of an entry.",
    "modulelens remove dlrm/over_arch@v2",
    Removed,
    arguments=(REF,),
    options=(REPO, Option("--force", bool, "Also where an alias points at it.")),
)
