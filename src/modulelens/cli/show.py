"""`modulelens show`: the page of one entry, read from its record alone."""

from __future__ import annotations

from modulelens.cli.command import CALL, REF, REPO, Command, Option, Reply
from modulelens.cli.repos import open_entry, with_repo
from modulelens.report.entry import entry_page, source_page
from modulelens.report.entry_view import EntryView, entry_view


def run(*, ref: str, repo: str | None, call: int | None, source: bool) -> Reply:
    """Shows the entry, or the captured source text of its class."""
    metadata = open_entry(ref, repo).metadata
    view = entry_view(metadata, call=call)
    text = source_page(metadata) if source else entry_page(view)
    name = f"{metadata.name}@v{metadata.version}"
    return Reply(
        view, text, next=[with_repo(f"{verb} {name}", repo) for verb in ("check", "bench")]
    )


COMMAND = Command(
    run,
    "Show one entry: init, inputs, outputs, source, grade.",
    "modulelens show dlrm/over_arch@v2 --call 1",
    EntryView,
    arguments=(REF,),
    options=(REPO, CALL, Option("--source", bool, "Print the captured source of the class.")),
)
