"""`modulelens push`: entries of a repo -> a team's remote; what waits, and what failed."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from modulelens.cli.command import REPO, Argument, Command, Option, Reply
from modulelens.cli.progress import progress
from modulelens.cli.repos import open_repo, with_repo
from modulelens.errors import Conflict, ModuleLensError, Unavailable, UsageError
from modulelens.report.quantity import plural, size
from modulelens.report.table import clean

if TYPE_CHECKING:
    from modulelens.repo import Repo

_LOOK_S = 2.0
_MOST_LINES, _AT_ONCE = 20, 500
#: How long a worker waits for another one that is at work on the same repo.
_WAIT_S = 600.0


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent, what was there already, what waits and what failed; `bytes` were sent.

    `removed` were there once, and have been removed there: they are not sent again.
    """

    remote: str
    sent: int
    known: int
    removed: int
    waiting: int
    failed: tuple[str, ...]
    bytes: int


def run(
    *,
    remote: str | None,
    terms: list[str],
    repo: str | None,
    tries: int,
    **wishes: bool,
) -> Reply | Iterator[Reply]:
    """Sends once, or whatever comes until Ctrl-C; entries that wait afterwards are exit code 7."""
    from modulelens.environment import rank_and_world
    from modulelens.store import parse_terms

    if remote and "://" not in remote:  # a term: the remote is that of the environment
        terms, remote = [remote, *terms], None
    if sum(wishes[way] for way in ("watch", "queued", "status")) > 1:
        raise UsageError("--watch, --queued and --status: one of them")
    if (wishes["queued"] or wishes["status"]) and terms:
        raise UsageError("--queued and --status are about all that waits", hint="leave out terms")
    if wishes["again"] and any(wishes[way] for way in ("watch", "queued", "status")):
        raise UsageError("--again is for a push of its own", hint="modulelens push --again")
    opened = open_repo(repo)
    if wishes["status"]:
        return _status(opened, remote or os.environ.get("MODULELENS_REMOTE"), repo)
    place, filter = remote_of(remote), parse_terms(terms)
    if wishes["watch"]:
        return _watch(opened, place, filter, repo)
    if wishes["queued"]:
        return _queued(opened, place, repo, verify=wishes["verify"], tries=tries)
    with progress("pushing") as bar:
        how: dict[str, Any] = {"again": wishes["again"], "tries": tries}
        done = opened.push(place, filter, progress=_shown(bar), **how)
    reply = _reply(place, done, repo)
    if rank := rank_and_world()[0]:
        told = f"RANK says that this is rank {rank} of a job: only rank 0 pushes; unset RANK here"
        return reply._replace(warnings=[told])
    return reply


def remote_of(given: str | None) -> str:
    """The remote of a command: what it names, else `$MODULELENS_REMOTE`.

    Raises:
        UsageError: Neither is there, or it is no URL of a remote.
    """
    from modulelens.store.remote import checked

    found = given or os.environ.get("MODULELENS_REMOTE")
    if not found:
        raise UsageError(
            "no remote: give its URL, or set MODULELENS_REMOTE",
            hint="such as wandb://entity/registry, s3://bucket/folder or file:///mnt/team",
        )
    return checked(found)


def _shown(bar: Callable[[int, int | None], None]) -> Callable[[Any], None]:
    def show(step: Any) -> None:
        if step.waits_s > 0 and sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[Ktrying again in {step.waits_s:.0f} s: {clean(step.why)}")
        bar(step.done, step.total)

    return show


def _reply(remote: str, done: Any, repo: str | None) -> Reply:
    report = PushReport(
        remote=remote,
        sent=done.sent,
        known=done.known,
        removed=done.removed,
        waiting=done.waiting,
        failed=tuple(done.failed),
        bytes=done.bytes,
    )
    text = f"{plural(done.sent, 'entry')} sent ({size(done.bytes)}), {done.known} there already"
    text += f", {done.waiting} waiting" if done.waiting else ""
    if done.removed:
        text += f", {done.removed} removed there since and not sent again (--again sends them)"
    lines = [f"failed: {clean(line)}" for line in done.failed[:_MOST_LINES]]
    failure: ModuleLensError | None = None
    warnings: list[str] = []
    if done.waiting:
        hint = with_repo(f"push {remote} --queued", repo)
        text_left = f"{remote} did not take {plural(done.waiting, 'entry')}: they wait in the repo"
        failure = Unavailable(f"{text_left}: {done.why}", hint=f"later: {hint}")
        lines += [f"waiting: {clean(done.why)}", f"later: {hint}"]
    elif done.failed:
        failure = UsageError(f"{plural(len(done.failed), 'entry')} cannot go there")
    elif not (done.sent or done.known or done.removed):
        warnings.append("no entry of the repo fits: nothing was to be sent")
    next_words = [f"modulelens find --remote {remote}"] if done.sent + done.known else []
    text = "\n".join([text, *lines])
    return Reply(report, text, next=next_words, warnings=warnings, failure=failure)


def _queued(repo: Repo, remote: str, path: str | None, *, verify: bool, tries: int) -> Reply:
    from modulelens.store.remote.background import step_back
    from modulelens.store.remote.outbox import WAITING, Outbox
    from modulelens.store.remote.push import send

    step_back()
    if verify:
        waiting = Outbox(repo.root / "outbox.sqlite").all(remote, (WAITING,))
        found = [repo[parcel.entry] for parcel in waiting if parcel.entry in repo]
        repo.verify([entry for entry in found if entry.grade is None])
    return _reply(remote, send(repo._store, remote, tries=tries, wait_s=_WAIT_S), path)


def _watch(repo: Repo, remote: str, filter: dict[str, Any], path: str | None) -> Iterator[Reply]:
    """One answer whenever something new was sent, until Ctrl-C."""
    from modulelens.store.remote.background import step_back

    step_back()
    seen: set[str] = set()
    while True:
        new = sorted({row.id for row in repo.rows(filter)} - seen)[:_AT_ONCE]
        done = None
        with suppress(Conflict):  # another push is at work, and sends these, too: look later
            done = repo.push(remote, {"id": {"$in": new}}) if new else None
        if done:
            seen.update(() if done.waiting else new)
            yield _reply(remote, done, path)
        time.sleep(_LOOK_S)


def _status(repo: Repo, remote: str | None, path: str | None) -> Reply:
    from modulelens.store.remote import checked
    from modulelens.store.remote.outbox import FAILED, SENT, WAITING, Outbox

    parcels = Outbox(repo.root / "outbox.sqlite").all(checked(remote) if remote else "")
    states = Counter(parcel.state for parcel in parcels)
    lines = [f"{states[SENT]} sent, {states[WAITING]} waiting, {states[FAILED]} failed"]
    open_ones = [parcel for parcel in parcels if parcel.state != SENT]
    shown = open_ones[:_MOST_LINES]
    rows = repo.rows({"id": {"$in": [parcel.entry for parcel in shown]}}) if shown else []
    names = {row.id: clean(f"{row.name}@v{row.version}") for row in rows}
    for parcel in shown:
        what = f"{parcel.state}: {names.get(parcel.entry, parcel.entry)} to {parcel.remote}"
        lines.append(f"{what}: {clean(parcel.error) or 'not tried yet'}")
    report = PushReport(
        remote=remote or "",
        sent=states[SENT],
        known=0,
        removed=0,
        waiting=states[WAITING],
        failed=tuple(f"{p.entry}: {p.error}" for p in parcels if p.state == FAILED),
        bytes=0,
    )
    words = [with_repo(f"push {p.remote} --queued", path) for p in open_ones[:1]]
    return Reply(report, "\n".join(lines), next=words)


COMMAND = Command(
    run,
    "Send entries to a team's remote.",
    "modulelens push wandb://my-team/modulelens 'model=dlrm' grade=exact",
    PushReport,
    arguments=(
        Argument("remote", "Its URL (wandb://, s3://, file://); else $MODULELENS_REMOTE.", False),
        Argument("terms", "Which entries, as for `find`; else all.", False, many=True),
    ),
    options=(
        REPO,
        Option("--watch", bool, "Send what comes into the repo, until Ctrl-C."),
        Option("--queued", bool, "Send only what waits in the outbox."),
        Option("--verify", bool, "With --queued: replay and grade first what has no grade."),
        Option(
            "--again",
            bool,
            "Also what was removed there; in a folder or bucket also the bytes of the rest.",
        ),
        Option("--status", bool, "Show what was sent, waits and failed; send nothing."),
        Option("--tries", int, "How often to try while the remote is away.", 5, metavar="N"),
    ),
)
