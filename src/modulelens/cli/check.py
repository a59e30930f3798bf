"""`modulelens check`: does the rebuilt module, or a candidate, compute what was captured?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator

from modulelens.cli.command import CALL, CANDIDATE, REF, REPO, Command, Option, Reply
from modulelens.cli.repos import open_entry, with_repo
from modulelens.errors import CheckFailed, ModuleLensError, TimedOut, UsageError
from modulelens.records import Check, Status
from modulelens.report.check import check_report, worst_line
from modulelens.report.table import clean

_TIMEOUT_S = 300.0
_WATCH_TIMEOUT_S = 60.0


def run(
    *,
    ref: str,
    candidate: str | None,
    repo: str | None,
    call: int | None,
    backward: bool,
    watch: bool,
    timeout: float | None,
) -> Reply | Iterator[Reply]:
    """Runs one check, or one after each edit; a mismatch is exit code 4."""
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: a check needs more than 0 seconds")
    entry = open_entry(ref, repo)

    def reply(check: Check) -> Reply:
        name = f"{entry.name}@v{entry.version}" + (f" with {candidate}" if candidate else "")
        next_words = f"show {ref}"
        if check:
            next_words = f"bench {ref} {candidate}" if candidate else f"bench {ref}"
        return Reply(
            check,
            check_report(check, name=name),
            next=[with_repo(next_words, repo)],
            failure=None if check else failure(check, name),
        )

    if watch:
        limit_s = timeout or _WATCH_TIMEOUT_S
        verdicts = entry.watch(candidate, call, backward, timeout_s=limit_s, started=_show_start)
        return _replies(verdicts, reply)
    return reply(entry.check(candidate, call, backward, timeout_s=timeout or _TIMEOUT_S))


def _replies(
    verdicts: Generator[Check, None, None], reply: Callable[[Check], Reply]
) -> Iterator[Reply]:
    """One answer per verdict, until the user ends it."""
    with contextlib.closing(verdicts):
        try:
            for check in verdicts:
                _show("")
                yield reply(check)
                _show("waiting for an edit, Ctrl-C ends")
        finally:
            _show("")


def _show_start(changed: tuple[str, ...]) -> None:
    _show(f"checking {clean(', '.join(changed))}")


def _show(text: str) -> None:
    """A line on the terminal that the next one replaces."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


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
    options=(
        REPO,
        CALL,
        Option("--backward", bool, "Compare gradients too."),
        Option("--watch", bool, "Check again after each edit, until Ctrl-C."),
        Option("--timeout", float, "Limit of one check; 300, with --watch 60.", metavar="SECONDS"),
    ),
)
