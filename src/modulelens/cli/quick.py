"""Reads a well-formed command line without importing typer, which costs more than most commands.

Whatever is unusual (help, an unknown option, a missing argument, a bad number) is left to typer,
which explains it; a test holds both to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modulelens.cli.command import Command


def parse(command: Command, words: Sequence[str]) -> dict[str, Any] | None:
    """The command's parameters, or None where typer has to look."""
    options = {option.flag: option for option in command.all_options}
    values: dict[str, Any] = {option.name: option.unset for option in options.values()}
    positional: list[str] = []
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        if not word.startswith("-"):
            positional.append(word)
            continue
        flag, equals, text = word.partition("=")
        option = options.get(flag)
        if option is None or (option.kind is bool and equals):
            return None
        if option.kind is bool:
            values[option.name] = True
            continue
        if not equals and not pending:
            return None
        try:
            value = option.kind(text if equals else pending.pop())
        except ValueError:
            return None
        values[option.name] = [*values[option.name], value] if option.many else value
    return _with_arguments(command, values, positional)


def _with_arguments(
    command: Command, values: dict[str, Any], positional: list[str]
) -> dict[str, Any] | None:
    for argument in command.arguments:
        if argument.many:
            values[argument.name], positional = positional, []
        else:
            values[argument.name] = positional.pop(0) if positional else argument.unset
        if argument.required and not values[argument.name]:
            return None
    return None if positional else values
