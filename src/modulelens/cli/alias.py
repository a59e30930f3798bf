"""`modulelens alias`: lets a name point at one version of a collection."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REF, REPO, Argument, Command, Reply
from modulelens.cli.repos import open_repo, with_repo
from modulelens.report.table import clean


class Aliased(msgspec.Struct, frozen=True, kw_only=True):
    """An entry, and the aliases of its collection with the versions they point at."""

    id: str
    aliases: dict[str, int]


def run(*, ref: str, name: str, repo: str | None) -> Reply:
    """Moves the alias to this version."""
    opened = open_repo(repo)
    entry = opened[ref]
    opened.alias(entry, name)
    text = f"{clean(entry.name)}@{clean(name)} is v{entry.version}"
    data = Aliased(id=entry.id, aliases=opened.aliases(entry))
    return Reply(data, text, next=[with_repo(f"show {entry.name}@{name}", repo)])


COMMAND = Command(
    run,
    "Let an alias point at an entry.",
    "modulelens alias dlrm/over_arch@v2 good",
    Aliased,
    arguments=(REF, Argument("name", "The alias; it moves from another version.")),
    options=(REPO,),
)
