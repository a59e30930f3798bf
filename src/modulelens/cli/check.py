"""`modulelens check`: does the rebuilt module, or a candidate, compute what was captured?"""

from __future__ import annotations

from modulelens.cli.command import CALL, CANDIDATE, REF, REPO, Command, Option, Reply
from modulelens.cli.repos import open_entry, with_repo
from modulelens.errors import CheckFailed, ModuleLensError, TimedOut
from modulelens.records import Check, Status
from modulelens.report.check import check_report, worst_line


def run(
    *, ref: str, candidate: str | None, repo: str | None, call: int | None, backward: bool
) -> Reply:
    """Runs one check and reports the verdict; a mismatch is exit code 4."""
    entry = open_entry(ref, repo)
    check = entry.check(candidate, call=call, backward=backward)
    name = f"{entry.name}@v{entry.version}" + (f" with {candidate}" if candidate else "")
    measured = f"{ref} {candidate}" if candidate else ref
    verb = "bench" if check else "show"
    return Reply(
        check,
        check_report(check, name=name),
        next=[with_repo(f"{verb} {measured if check else ref}", repo)],
        failure=None if check else failure(check, name),
    )


def failure(check: Check, name: str) -> ModuleLensError:
    """The error that stands for a check that did not pass."""
    kind = TimedOut if check.status is Status.TIMEOUT else CheckFailed
    hint = "the leaf that decided is in data.leaves" if check.leaves else ""
    return kind(f"{check.status.value}: {name}: {worst_line(check)}", hint=hint)


COMMAND = Command(
    run,
    "Check the module, or a candidate, against its capture.",
    "modulelens check dlrm/over_arch fused.py:FusedMLP --backward",
    Check,
    arguments=(REF, CANDIDATE),
    options=(REPO, CALL, Option("--backward", bool, "Compare gradients too.")),
)
