"""`modulelens find`: entries by what is known about them."""

from __future__ import annotations

from modulelens.cli.command import LIMIT, OFFSET, REPO, Argument, Command, Option, Reply
from modulelens.cli.listing import Listing, list_entries
from modulelens.errors import UsageError


def run(
    *, terms: list[str], repo: str | None, remote: str | None, limit: int, offset: int
) -> Reply:
    """Lists the entries that fit all terms, of the repo or of a remote."""
    from modulelens.store import parse_terms

    if repo and remote:
        raise UsageError("--repo and --remote: one of them")
    return list_entries(parse_terms(terms), repo=remote or repo, limit=limit, offset=offset)


COMMAND = Command(
    run,
    "Find entries by terms such as 'params>1e6'.",
    "modulelens find 'params>1e6' input.dtype=bfloat16 'cls~Attention' grade!=exact",
    Listing,
    arguments=(
        Argument(
            "terms",
            "FIELD SIGN VALUE, all have to fit. Signs: = != < <= > >= ~ (regex) : (list contains).",
            False,
            many=True,
        ),
    ),
    options=(
        REPO,
        Option("--remote", str, "Search a remote (wandb://, s3://, file://).", metavar="URL"),
        LIMIT,
        OFFSET,
    ),
)
