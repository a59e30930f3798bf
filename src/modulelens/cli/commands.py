"""`modulelens commands`: what this command line can do, for people and agents."""

from __future__ import annotations

import msgspec

from modulelens.cli.command import Command, Reply
from modulelens.report.table import table


class CommandInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One command: `usage` shows its arguments, optional ones in brackets."""

    name: str
    summary: str
    usage: str
    options: tuple[str, ...]
    example: str


class CommandList(msgspec.Struct, frozen=True, kw_only=True):
    """All commands, and the fixed exit codes."""

    commands: tuple[CommandInfo, ...]
    exit_codes: dict[str, str]


EXIT_CODES = {
    "0": "ok",
    "1": "internal error",
    "2": "usage",
    "3": "not found",
    "4": "check failed",
    "5": "environment lacks something",
    "6": "conflict",
    "7": "timeout",
    "130": "interrupted",
}


def run() -> Reply:
    """Lists all commands."""
    from modulelens.cli import COMMANDS, load

    infos = tuple(_info(name, load(name)) for name in COMMANDS)
    text = table(("COMMAND", "WHAT IT DOES"), [(info.usage, info.summary) for info in infos])
    return Reply(
        CommandList(commands=infos, exit_codes=EXIT_CODES),
        f"{text}\n`modulelens COMMAND --help` shows the options.",
        next=["modulelens schema COMMAND"],
    )


def _info(name: str, command: Command) -> CommandInfo:
    words = [
        (f"{a.name.upper()}..." if a.many else a.name.upper())
        if a.required
        else f"[{a.name.upper()}]"
        for a in command.arguments
    ]
    return CommandInfo(
        name=name,
        summary=command.summary,
        usage=" ".join([name, *words]),
        options=tuple(option.flag for option in command.all_options),
        example=command.example,
    )


COMMAND = Command(
    run, "List the commands with their usage.", "modulelens commands --json", CommandList
)
