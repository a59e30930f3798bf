"""`modulelens gc`: removes blobs that no entry needs, and what dead writers left behind."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REPO, Command, Reply
from modulelens.cli.repos import open_repo
from modulelens.report.upkeep import gc_report


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed."""

    blobs: int
    freed_bytes: int
    leftovers: int


def run(*, repo: str | None) -> Reply:
    """Collects garbage; entries are never touched."""
    done = open_repo(repo).gc()
    data = Collected(
        blobs=done.removed_blobs, freed_bytes=done.freed_bytes, leftovers=done.removed_leftovers
    )
    text = gc_report(blobs=data.blobs, freed_bytes=data.freed_bytes, leftovers=data.leftovers)
    return Reply(data, text)


COMMAND = Command(
    run,
    "Remove blobs that no entry needs.",
    "modulelens gc --repo /data/lens",
    Collected,
    options=(REPO,),
)
