"""`modulelens find`: entries by what is known about them."""

from __future__ import annotations

from modulelens.cli.command import LIMIT, OFFSET, REPO, Argument, Command, Reply
from modulelens.cli.listing import Listing, list_entries


def run(*, terms: list[str], repo: str | None, limit: int, offset: int) -> Reply:
    """Lists the entries that fit all terms."""
    from modulelens.store import parse_terms

    return list_entries(parse_terms(terms), repo=repo, limit=limit, offset=offset)


COMMAND = Command(
    run,
    "Find entries by terms such as 'params>1e6'.",
    "modulelens find 'params>1e6' input.dtype=bfloat16 'cls~Attention' grade!=exact",
    Listing,
    arguments=(
        Argument(
            "terms",
            "FIELD SIGN VALUE, all have to fit. Signs: = != < <= > >= ~ (regex) : (list contains).",
            True,
            many=True,
        ),
    ),
    options=(REPO, LIMIT, OFFSET),
)
