"""`modulelens gc`: removes blobs that no entry needs, and what dead writers left behind."""

from __future__ import annotations

from modulelens.cli.command import REPO, Command, Reply
from modulelens.cli.repos import open_repo, with_repo
from modulelens.report.upkeep import gc_report
from modulelens.store import GcReport


def run(*, repo: str | None) -> Reply:
    """Collects garbage; entries are never touched."""
    done = open_repo(repo).gc()
    text = gc_report(
        blobs=done.removed_blobs,
        freed_bytes=done.freed_bytes,
        leftovers=done.removed_leftovers,
        unreadable=done.unreadable,
    )
    return Reply(done, text, next=[with_repo("fsck", repo)] if done.unreadable else [])


COMMAND = Command(
    run,
    "Remove blobs that no entry needs.",
    "modulelens gc --repo /data/lens",
    GcReport,
    options=(REPO,),
)
