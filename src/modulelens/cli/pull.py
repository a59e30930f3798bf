"""`modulelens pull`: entries of a team's remote -> this repo, every byte checked."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import REPO, Argument, Command, Option, Reply
from modulelens.cli.progress import progress
from modulelens.cli.push import remote_of
from modulelens.cli.repos import open_repo, with_repo
from modulelens.errors import UsageError
from modulelens.report.quantity import plural, size
from modulelens.report.table import clean

_MOST_LINES = 20


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """The entries as they are in this repo now, and the bytes of packs that were fetched."""

    remote: str
    entries: tuple[str, ...]
    bytes: int


def run(*, refs: list[str], remote: str | None, where: list[str], repo: str | None) -> Reply:
    """Pulls the entries named, or those that fit all terms."""
    from modulelens.store import parse_terms

    if bool(refs) == bool(where):
        hint = "modulelens pull dlrm/over_arch, or modulelens pull --where model=dlrm"
        raise UsageError("which entries: references, or terms with --where", hint=hint)
    place, opened = remote_of(remote), open_repo(repo, create=True)
    came, found = 0, []
    with progress("pulling") as bar:

        def note(nbytes: int) -> None:
            nonlocal came
            came += nbytes
            bar(came, None)

        for ref in refs:
            found += opened.pull(place, ref, progress=note)
        if where:
            found += opened.pull(place, None, parse_terms(where), progress=note)
    names = tuple(f"{entry.name}@v{entry.version}" for entry in found)
    lines = [f"{plural(len(names), 'entry')} from {place}: {size(came)} fetched"]
    lines += [clean(name) for name in names[:_MOST_LINES]]
    return Reply(
        Pulled(remote=place, entries=names, bytes=came),
        "\n".join(lines),
        next=[with_repo(f"check {names[0]}", repo)],
    )


COMMAND = Command(
    run,
    "Bring entries from a team's remote.",
    "modulelens pull dlrm/over_arch@baseline --remote wandb://my-team/modulelens",
    Pulled,
    arguments=(Argument("refs", "model/fqn, each alone or with @v2 or @alias.", False, many=True),),
    options=(
        Option("--remote", str, "Its URL; else $MODULELENS_REMOTE.", metavar="URL"),
        Option("--where", str, "A term as for `find`, may be repeated.", many=True, metavar="TERM"),
        REPO,
    ),
)
