"""`modulelens export`: one entry as a file that plain torch can open."""

from __future__ import annotations

from pathlib import Path

import msgspec

from modulelens.cli.command import REF, REPO, Argument, Command, Reply
from modulelens.cli.repos import open_entry
from modulelens.report.quantity import size


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The file that was written."""

    file: str
    bytes: int


def run(*, ref: str, file: str, repo: str | None) -> Reply:
    """Writes the file; it opens with `torch.load(file, weights_only=True, mmap=True)`."""
    open_entry(ref, repo).export(file)
    data = Exported(file=file, bytes=Path(file).stat().st_size)
    return Reply(data, f"wrote {file}, {size(data.bytes)}")


COMMAND = Command(
    run,
    "Export one entry to a file for plain torch.load.",
    "modulelens export dlrm/over_arch over_arch.pt",
    Exported,
    arguments=(REF, Argument("file", "The file to write.")),
    options=(REPO,),
)
