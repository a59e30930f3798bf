"""`modulelens merge`: the parts that the ranks of a job stored -> entries of whole modules."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REPO, Argument, Command, Option, Reply
from modulelens.cli.repos import open_repo, with_repo
from modulelens.report.table import clean


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that was merged: its name, the ranks whose parts it has, its grade."""

    id: str
    name: str
    ranks: tuple[int, ...]
    grade: str


class MergedList(msgspec.Struct, frozen=True, kw_only=True):
    """All that were merged."""

    merged: tuple[Merged, ...]


def run(*, refs: list[str], repo: str | None, no_verify: bool) -> Reply:
    """Merges each."""
    place, found = open_repo(repo), []
    for ref in refs:
        entry = place.merge(ref, verify=not no_verify)
        ranks, grade = entry.metadata.merged, str(entry.grade) if entry.grade else "unverified"
        name = f"{entry.name}@v{entry.version}"
        found.append(Merged(id=entry.id, name=name, ranks=ranks, grade=grade))
    lines = [f"{clean(m.name)}: ranks {', '.join(map(str, m.ranks))}, {m.grade}" for m in found]
    shown = [with_repo(f"show {m.name}", repo) for m in found[:1]]
    return Reply(MergedList(merged=tuple(found)), "\n".join(lines), next=shown)


COMMAND = Command(
    run,
    "Put together what the ranks of a sharded job stored.",
    "modulelens merge llama/layers.0.mlp",
    MergedList,
    arguments=(Argument("refs", "Entries that lie in parts.", many=True),),
    options=(Option("--no-verify", bool, "Store without replaying and grading."), REPO),
)
