"""The command line: finds the command, parses, runs it, prints one report, returns an exit code.

Commands live in one file each and are imported when they are named. `quick` parses well-formed
lines; typer is imported for help, completion and mistakes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from modulelens.cli.command import Command, Reply
from modulelens.errors import ModuleLensError, UsageError

COMMANDS = (
    "trace",
    "ls",
    "show",
    "find",
    "check",
    "bench",
    "profile",
    "diff",
    "export",
    "merge",
    "push",
    "pull",
    "tag",
    "alias",
    "remove",
    "gc",
    "fsck",
    "reindex",
    "doctor",
    "demo",
    "commands",
    "schema",
)
INTERRUPTED = 130


def load(name: str) -> Command:
    """The command's definition."""
    command: Command = importlib.import_module(f"modulelens.cli.{name}").COMMAND
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; prints every outcome itself."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    as_json = _wants_json(words)
    name = words[0] if words[0] in COMMANDS else ""
    try:
        _check_text(words)
        return _dispatch(words)
    except ModuleLensError as error:
        return _fail(name, error, as_json)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`); closing stdout at exit would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:  # noqa: BLE001  boundary: the last stop before the user
        return _fail_unexpected(name, error, as_json)


def _check_text(words: list[str]) -> None:
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # bytes that are no UTF-8
            raise UsageError(f"{word!r} is no text", hint="arguments have to be UTF-8")


def _dispatch(words: list[str]) -> int:
    from modulelens.cli import quick

    name = words[0]
    if name == "--version":
        from modulelens import __version__
        from modulelens.cli.output import write

        write(f"modulelens {__version__}", sys.stdout)
        return 0
    if name in COMMANDS:
        command = load(name)
        values = None if command.rest else quick.parse(command, words[1:])
        if values is not None:
            return run(name, values)
    elif not name.startswith("-") and "_MODULELENS_COMPLETE" not in os.environ:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=3, cutoff=0.5)
        hint = "modulelens --help"
        raise UsageError(f"no command {name!r}", hint=hint, did_you_mean=close)
    from modulelens.cli import parser

    parsed = parser.parse({known: load(known) for known in COMMANDS}, words)
    return 0 if parsed is None else run(*parsed)


def run(name: str, values: dict[str, Any]) -> int:
    """Runs a command with its parameters, prints each answer, returns the last one's exit code.

    Ctrl-C ends a command that goes on; before its first answer it is an interruption.
    """
    command = load(name)
    as_json = values.pop("json") or os.environ.get("MODULELENS_OUTPUT") == "json"
    code: int | None = None
    try:
        with contextlib.closing(_replies(command, values)) as replies:
            while (answer := _next(replies, command, as_json)) is not None:
                # Before it is printed: who reads it may end the command at once.
                code = answer[0].failure.exit_code if answer[0].failure else 0
                _print(name, *answer, as_json)
    except KeyboardInterrupt:
        if code is None:
            raise
    return code or 0


def _next(
    replies: Iterator[Reply], command: Command, as_json: bool
) -> tuple[Reply, list[str]] | None:
    """The next answer and the warnings on the way to it; None at the end."""
    from modulelens.cli.output import stdout_kept_clean, warnings_noted

    noticed: list[str] = []
    with contextlib.ExitStack() as scope:
        if not command.rest:  # the warnings of a user's own script are shown as they come
            scope.enter_context(warnings_noted(noticed))
        if as_json:
            scope.enter_context(stdout_kept_clean())
        reply = next(replies, None)
    return None if reply is None else (reply, noticed)


def _print(name: str, reply: Reply, noticed: list[str], as_json: bool) -> None:
    from modulelens.cli.output import envelope, write

    if as_json:
        write(envelope(name, reply, noticed).decode(), sys.stdout)
        return
    for text in [*reply.warnings, *noticed]:
        write(f"warning: {text}", sys.stderr)
    write(reply.text, sys.stdout)


def _replies(command: Command, values: dict[str, Any]) -> Generator[Reply, None, None]:
    answer = command.run(**values)
    yield from [answer] if isinstance(answer, Reply) else answer


def _wants_json(words: list[str]) -> bool:
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own or os.environ.get("MODULELENS_OUTPUT") == "json"


def _fail(name: str, error: ModuleLensError, as_json: bool) -> int:
    from modulelens.cli.output import error_envelope, problem, write
    from modulelens.report.table import clean_block

    if as_json:
        write(error_envelope(name, problem(error)).decode(), sys.stdout)
    else:
        write(f"error: {clean_block(str(error))}", sys.stderr)
    return error.exit_code


def _fail_unexpected(name: str, error: Exception, as_json: bool) -> int:
    import traceback

    from modulelens.cli.output import Problem, error_envelope, write

    write("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
    message = f"{type(error).__name__}: {error}"
    if as_json:
        problem = Problem(code="INTERNAL", message=message, hint="the traceback is on stderr")
        write(error_envelope(name, problem).decode(), sys.stdout)
    return 1
