"""The typer app, built from the commands' own definitions: help, completion, usage errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Optional

import typer

from modulelens.cli.command import Argument, Command, Option
from modulelens.errors import UsageError

HELP = """Capture one PyTorch module in a real training step, then rebuild, check and measure it.

Exit codes: 0 ok, 1 internal, 2 usage, 3 not found, 4 check failed, 5 environment lacks something,
6 conflict, 7 timeout, 130 interrupted.
"""
EXAMPLE = "Example: modulelens demo"

# typer brings its own copy of click or uses the installed one; the base of its errors is in both.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


def parse(
    commands: Mapping[str, Command], words: Sequence[str]
) -> tuple[str, dict[str, Any]] | None:
    """The command's name and its parameters; None where typer has answered (help, completion).

    Raises:
        UsageError: The words do not fit; the message is typer's.
    """
    app = typer.Typer(
        help=HELP,
        add_completion=True,
        epilog=EXAMPLE,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    )
    found: list[tuple[str, dict[str, Any]]] = []
    for name, command in commands.items():
        app.command(
            name,
            help=command.summary,
            epilog=f"Example: {command.example}",
            context_settings={"allow_interspersed_args": not command.rest},
        )(_callback(name, command, found))
    app.callback()(_version)
    try:
        app(args=list(words), prog_name="modulelens", standalone_mode=False)
    except _ParserError as error:
        raise UsageError(_message(error), hint=_hint(error)) from error
    return found[0] if found else None


def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Only for the help page: `main` answers `--version` itself."""


def _callback(
    name: str, command: Command, found: list[tuple[str, dict[str, Any]]]
) -> Callable[..., None]:
    def callback(**values: Any) -> None:
        found.append((name, values))

    parameters = [*map(_argument, command.arguments), *map(_option, command.all_options)]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {p.name: p.annotation for p in parameters}
    return callback


def _argument(argument: Argument) -> inspect.Parameter:
    kind: Any = list[str] if argument.many else str
    shown = argument.name.upper()
    return inspect.Parameter(
        argument.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=... if argument.required else argument.unset,
        annotation=Annotated[
            kind if argument.required or argument.many else Optional[kind],  # noqa: UP045
            typer.Argument(help=argument.help, metavar=shown, show_default=False),
        ],
    )


def _option(option: Option) -> inspect.Parameter:
    kind: Any = option.kind
    if option.many:
        kind = list[kind]
    elif option.unset is None:
        kind = Optional[kind]  # noqa: UP045
    info = typer.Option(
        option.flag,
        help=option.help,
        metavar=option.metavar or None,
        show_default=option.kind is not bool and option.default is not None,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.unset,
        annotation=Annotated[kind, info],
    )


def _message(error: Exception) -> str:
    text = getattr(error, "format_message", lambda: str(error))()
    return str(text).rstrip(".")


def _hint(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'modulelens'} --help"
