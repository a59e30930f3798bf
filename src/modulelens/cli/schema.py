"""`modulelens schema`: the JSON Schema of what a command prints under --json."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec

from modulelens.cli.command import Argument, Command, Reply
from modulelens.cli.output import Problem, schema_name
from modulelens.errors import NotFound


def run(*, command: str) -> Reply:
    """The schema of the command's envelope, for an answer and for an error."""
    from modulelens.cli import COMMANDS, load

    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=3, cutoff=0.5)
        hint = "modulelens commands"
        raise NotFound(f"no command {command!r}", hint=hint, did_you_mean=close)
    schema = msgspec.json.schema(envelope_type(command, load(command)))
    return Reply(schema, msgspec.json.format(msgspec.json.encode(schema)).decode())


def envelope_type(name: str, command: Command) -> type[msgspec.Struct]:
    """The type of the command's envelope; decoding into it validates an output."""
    fields: list[Any] = [
        ("schema", Literal[schema_name(name)]),
        ("ok", bool),
        ("data", command.data | None, None),
        ("warnings", list[str], []),
        ("next", list[str], []),
        ("error", Problem | None, None),
    ]
    return msgspec.defstruct("Envelope", fields, kw_only=True, forbid_unknown_fields=True)


COMMAND = Command(
    run,
    "Print the JSON Schema of a command's --json.",
    "modulelens schema show",
    dict,
    arguments=(Argument("command", "The command's name."),),
)
