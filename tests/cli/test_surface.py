"""The surface is frozen: commands, options, exit codes, help. Change it on purpose, here."""

from __future__ import annotations

import inspect
import shlex

import pytest
from tests.cli.shell import modulelens

from modulelens import errors
from modulelens.cli import COMMANDS, load, main, parser, quick
from modulelens.cli.commands import EXIT_CODES

FROZEN = {
    "trace": "SCRIPT... --modules --methods --model --name --steps --ranks --warmup "
    "--keep --grads --no-verify -m --repo --json",
    "ls": "[PREFIX] --repo --limit --offset --json",
    "show": "REF --repo --call --source --json",
    "find": "[TERMS] --repo --remote --limit --offset --json",
    "check": "REF [CANDIDATE] --repo --call --backward --watch --timeout --json",
    "bench": "REF [CANDIDATE] --repo --no-backward --budget --fail-below --out --json",
    "profile": "REF --repo --limit --trace-file --json",
    "diff": "OLD NEW --repo --json",
    "export": "REF FILE --repo --json",
    "merge": "REFS... --no-verify --repo --json",
    "push": "[REMOTE] [TERMS] --repo --watch --queued --verify --again --status --tries --json",
    "pull": "[REFS] --remote --where --repo --json",
    "tag": "REF TAGS... --repo --json",
    "alias": "REF NAME --repo --json",
    "remove": "REF --repo --force --json",
    "gc": "--repo --json",
    "fsck": "--repo --json",
    "reindex": "--repo --json",
    "doctor": "--repo --quick --json",
    "demo": "--keep-dir --json",
    "commands": "--json",
    "schema": "COMMAND --json",
}


def test_commands_and_options_are_frozen() -> None:
    listed = modulelens("commands", "--json").json["data"]["commands"]
    shown = {c["name"]: " ".join(c["usage"].split()[1:] + c["options"]) for c in listed}
    assert shown == FROZEN


def test_exit_codes_are_frozen() -> None:
    codes = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.ModuleLensError)
    }
    assert codes == {
        "ModuleLensError": 1,
        "UsageError": 2,
        "NotFound": 3,
        "CheckFailed": 4,
        "EnvironmentLacks": 5,
        "ClassNotFound": 5,
        "NotRebuildable": 5,
        "DiskFull": 5,
        "PermissionDenied": 5,
        "Conflict": 6,
        "TimedOut": 7,
        "Unavailable": 7,
        "RepoError": 1,
        "Corrupted": 1,
        "SchemaTooNew": 1,
        "NotARepo": 1,
        "CandidateBroken": 4,
        "ForeignError": 4,
        "WorkerCrashed": 4,
    }
    assert list(EXIT_CODES) == ["0", "1", "2", "3", "4", "5", "6", "7", "130"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_definition_fits_its_function(name: str) -> None:
    command = load(name)
    given = {a.name for a in command.arguments} | {o.name for o in command.options}
    parameters = inspect.signature(command.run).parameters
    assert set(parameters) - {"wishes"} <= given
    assert "wishes" in parameters or set(parameters) == given


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_screen_and_ends_with_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    command = load(name)
    assert "Example:" in "\n".join(lines[-2:])
    program, *words = shlex.split(command.example)
    assert program == "modulelens"
    assert parser.parse({name: command}, words) is not None


def test_the_help_fits_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("...") for line in lines[1:])
    assert lines[-1].strip() == "Example: modulelens demo"
    assert all(any(line.split()[:1] == [name] for line in lines) for name in COMMANDS)


LINES = [
    "ls",
    "ls dlrm",
    "ls dlrm --limit 5 --offset=10 --json",
    "ls --limit x",
    "ls --limit",
    "ls a b",
    "ls --nope",
    "ls --json=1",
    "ls -- dlrm",
    "ls --lim 5",
    "show",
    "show a/b@v2 --call 1 --source",
    "show a --call=-1",
    "show a --call 1.5",
    "show a --repo p --repo q",
    "find",
    "find params>1e6 cls~A.* --repo p",
    "find --limit 3 params>1",
    "check a b.py:C --backward",
    "bench a --budget 2 --fail-below 1.5",
    "bench a --budget nan",
    "profile a --trace-file=x=y",
    "doctor --quick --help",
    "diff a",
    "export a ''",
]


@pytest.mark.parametrize("line", LINES)
def test_both_parsers_agree(line: str) -> None:
    name, *words = shlex.split(line)
    command = load(name)
    fast = quick.parse(command, words)
    if fast is None:
        return  # typer decides
    slow = parser.parse({known: load(known) for known in ("schema", name)}, [name, *words])
    assert slow is not None
    assert repr(slow[1]) == repr({key: fast[key] for key in slow[1]})
    assert set(fast) == set(slow[1])


def test_the_quick_parser_reads_what_people_type() -> None:
    taken = [line for line in LINES if quick.parse(load(line.split()[0]), shlex.split(line)[1:])]
    assert "show a/b@v2 --call 1 --source" in taken
    assert "find params>1e6 cls~A.* --repo p" in taken
    assert not {"ls --nope", "ls a b", "show", "ls --limit x", "ls --limit"} & set(taken)
