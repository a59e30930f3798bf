"""What a command is: its function, its arguments and options, its answer. Knows no parser.

One definition feeds the quick parser, typer, `modulelens commands` and the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from modulelens.errors import ModuleLensError


class Option(NamedTuple):
    """One option. `kind` converts its text; a `bool` is a switch; `many` may be repeated."""

    flag: str
    kind: type
    help: str
    default: Any = None
    many: bool = False
    metavar: str = ""

    @property
    def name(self) -> str:
        """The parameter that receives it: `--no-verify` -> `no_verify`."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def unset(self) -> Any:
        """Its value where it is not given."""
        return [] if self.many else False if self.kind is bool else self.default


class Argument(NamedTuple):
    """One positional argument; `many` takes all that are left."""

    name: str
    help: str
    required: bool = True
    many: bool = False

    @property
    def unset(self) -> Any:
        """Its value where it is not given."""
        return [] if self.many else None


class Reply(NamedTuple):
    """What a command answers: records for agents, text for people, and what to do next.

    `failure` is set where the command did its work and the outcome is a failed check.
    """

    data: Any
    text: str
    next: Sequence[str] = ()
    warnings: Sequence[str] = ()
    failure: ModuleLensError | None = None


class Command(NamedTuple):
    """One command.

    A command that goes on answers one `Reply` after another. `data` is the type of `Reply.data`.
    `rest` hands what follows the first positional argument to the command, options too, instead of
    reading them.
    """

    run: Callable[..., Reply | Iterator[Reply]]
    summary: str
    example: str
    data: type
    arguments: tuple[Argument, ...] = ()
    options: tuple[Option, ...] = ()
    rest: bool = False

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options and those of every command."""
        return (*self.options, JSON)


JSON = Option("--json", bool, "Print one JSON envelope instead of text.")
REPO = Option("--repo", str, "The repo; else $MODULELENS_REPO, else ./.modulelens.", metavar="PATH")
LIMIT = Option("--limit", int, "Most lines to show.", 20, metavar="N")
OFFSET = Option("--offset", int, "Lines to skip.", 0, metavar="N")
CALL = Option("--call", int, "Which of the entry's calls.", metavar="N")
REF = Argument("ref", "model/fqn, model/fqn@v2, model/fqn@alias, or an entry id.")
CANDIDATE = Argument(
    "candidate", "Another implementation: path/file.py:Name. Without it, the original.", False
)
