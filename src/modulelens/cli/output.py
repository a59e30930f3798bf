"""Where output leaves: one JSON envelope or plain text on stdout, errors and notices on stderr.

Knows terminals and streams, not commands.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import msgspec

from modulelens.cli.command import Reply
from modulelens.errors import ModuleLensError
from modulelens.report.table import shorten

_MOST_WARNINGS = 20
_LONGEST_MESSAGE = 4000
_COLOURS = {"good": "32", "bad": "31", "weak": "33"}
_WORDS = re.compile(
    r"\b(?:(?P<good>EXACT|exact|faster)|(?P<bad>MISMATCH_[A-Z]+|RUNTIME_ERROR|TIMEOUT|slower)"
    r"|(?P<weak>CLOSE|NOT_COMPARABLE|UNKNOWN|undecided))\b"
)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data. `code` is stable; `hint` says the next step."""

    code: str
    message: str
    hint: str = ""
    did_you_mean: tuple[str, ...] = ()


def schema_name(command: str) -> str:
    """Name and version of the envelope of one command."""
    return f"modulelens.{command}/1"


def envelope(command: str, reply: Reply, noticed: Sequence[str] = ()) -> bytes:
    """The envelope of an answer; `ok` is False where the answer is a failed check."""
    body: dict[str, Any] = {
        "schema": schema_name(command),
        "ok": reply.failure is None,
        "data": reply.data,
        "warnings": [*reply.warnings, *noticed],
        "next": list(reply.next),
    }
    if reply.failure is not None:
        body["error"] = problem(reply.failure)
    return msgspec.json.encode(body)


def error_envelope(command: str, error: Problem) -> bytes:
    """The envelope of an error."""
    body = {"schema": schema_name(command or "error"), "ok": False, "error": error}
    return msgspec.json.encode(body)


def problem(error: ModuleLensError) -> Problem:
    """The error as data."""
    return Problem(
        code=error.code,
        message=shorten(error.message, _LONGEST_MESSAGE),
        hint=error.hint,
        did_you_mean=error.did_you_mean,
    )


def write(text: str, stream: TextIO) -> None:
    """Writes a line; colours status words on a terminal only; never fails on an odd encoding."""
    if _is_terminal(stream):
        text = _WORDS.sub(lambda m: f"\x1b[{_COLOURS[str(m.lastgroup)]}m{m[0]}\x1b[0m", text)
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Whatever foreign code prints goes to stderr, so that stdout holds the envelope alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Whatever foreign code closes or redirects, both streams are afterwards as they were."""
    streams = {1: sys.stdout, 2: sys.stderr}
    kept = {number: os.dup(number) for number, stream in streams.items() if stream is not None}
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr, *streams.values()):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # while what it writes to is what the foreign code wanted
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        sys.stdout, sys.stderr = (_open_again(*item) for item in streams.items())


def _open_again(number: int, stream: TextIO) -> TextIO:
    with contextlib.suppress(ValueError):
        if stream is None or stream.write("") == 0:
            return stream
    return open(number, "w", errors="backslashreplace", closefd=False)


@contextlib.contextmanager
def warnings_noted(found: list[str]) -> Iterator[None]:
    """Collects the text of Python warnings in `found`, each once, in place of printing them."""

    def note(message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        if text not in found and len(found) < _MOST_WARNINGS:
            found.append(text)

    with warnings.catch_warnings():
        warnings.showwarning = note
        yield
