"""`modulelens ls`: the entries of a repo, newest first."""

from __future__ import annotations

import re
from typing import Any

from modulelens.cli.command import LIMIT, OFFSET, REPO, Argument, Command, Reply
from modulelens.cli.listing import Listing, list_entries


def run(*, prefix: str | None, repo: str | None, limit: int, offset: int) -> Reply:
    """Lists all entries, or those whose name begins with `prefix`."""
    filter: dict[str, Any] = {"name": {"$regex": f"^{re.escape(prefix)}"}} if prefix else {}
    return list_entries(filter, repo=repo, limit=limit, offset=offset)


COMMAND = Command(
    run,
    "List entries, newest first.",
    "modulelens ls dlrm --limit 5",
    Listing,
    arguments=(Argument("prefix", "Begin of the entries' names, such as a model.", False),),
    options=(REPO, LIMIT, OFFSET),
)
