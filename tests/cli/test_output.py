"""What leaves the program: envelopes that fit their schema, plain text, frozen failures."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.cli.shell import modulelens

from modulelens.cli import load
from modulelens.cli.schema import envelope_type

BOXES = set("─│╭╮╰╯┌┐└┘━┃")


def assert_fits_schema(name: str, output: str) -> None:
    msgspec.json.decode(output, type=envelope_type(name, load(name)))


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        (["shwo"], 2, "USAGE_ERROR"),
        (["ls", "--nope"], 2, "USAGE_ERROR"),
        (["ls", "--limit", "x"], 2, "USAGE_ERROR"),
        (["show"], 2, "USAGE_ERROR"),
        (["schema", "shw"], 3, "NOT_FOUND"),
        (["ls", "--repo", "/does/not/exist"], 3, "NOT_FOUND"),
        (["demo", "--keep-dir", "/etc"], 2, "USAGE_ERROR"),
        (["trace", "--keep", "half", "x.py"], 2, "USAGE_ERROR"),
    ],
)
def test_failures_are_envelopes_with_json_and_stderr_without(
    words: list[str], exit_code: int, code: str
) -> None:
    with_json = modulelens(words[0], *(["--json"] if len(words) > 1 else []), *words[1:], **JSON)
    assert with_json.code == exit_code
    assert with_json.json["ok"] is False
    assert with_json.json["error"]["code"] == code
    assert with_json.err == ""
    plain = modulelens(*words)
    assert plain.code == exit_code
    assert plain.out == ""
    assert plain.err.startswith("error: ")


JSON = {"MODULELENS_OUTPUT": "json"}


def test_a_typo_gets_a_suggestion() -> None:
    assert modulelens("shwo", **JSON).json["error"]["did_you_mean"][0] == "show"
    assert "did you mean 'show'" in modulelens("shwo").err


@pytest.mark.parametrize("name", ["commands", "doctor --quick", "schema show", "schema commands"])
def test_answers_fit_their_schema_and_are_small(name: str) -> None:
    command, *rest = name.split()
    done = modulelens(command, *rest, "--json")
    assert done.code == 0
    assert len(done.out) < 8_000
    assert done.out.count("\n") == 1
    assert_fits_schema(command, done.out)
    assert modulelens(command, *rest, **JSON).json == done.json


@pytest.mark.parametrize("words", [[], ["commands"], ["ls", "--nope"], ["trace", "--help"]])
def test_nothing_is_drawn_off_a_terminal(words: list[str]) -> None:
    done = modulelens(*words, FORCE_COLOR="1")
    text = done.out + done.err
    assert "\x1b" not in text
    assert not BOXES & set(text)


def test_an_ascii_terminal_is_no_obstacle(tmp_path: Path) -> None:
    done = modulelens("ls", "--repo", str(tmp_path / "mod\u00e8le"), PYTHONIOENCODING="ascii")
    assert done.code == 3
    assert "mod\\xe8le" in done.err


def test_status_words_have_colour_on_a_terminal_only() -> None:
    code = (
        "import sys; from modulelens.cli.output import write\n"
        "write('EXACT MISMATCH_VALUE', sys.stdout)"
    )
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert piped.stdout == "EXACT MISMATCH_VALUE\n"
    leader, follower = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stdout=follower, env=environment, check=True)
    shown = os.read(leader, 1000).decode()
    os.close(leader)
    os.close(follower)
    assert "\x1b[32mEXACT\x1b[0m \x1b[31mMISMATCH_VALUE\x1b[0m" in shown


def test_a_reader_that_leaves_is_no_error() -> None:
    code = f"{sys.executable} -m modulelens schema show | head -c 1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_environment_reports_an_internal_error_as_data() -> None:
    code = (
        "import sys; from modulelens import cli; from modulelens.cli import commands as c\n"
        "def broken(): raise ValueError('boom')\n"
        "c.COMMAND = c.COMMAND._replace(run=broken)\n"
        "sys.exit(cli.main(['commands', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    answer = msgspec.json.decode(done.stdout)
    assert answer["error"]["code"] == "INTERNAL"
    assert answer["error"]["message"] == "ValueError: boom"
    assert "Traceback" in done.stderr


def test_foreign_prints_do_not_reach_the_envelope() -> None:
    code = (
        "import os, sys; from modulelens import cli; from modulelens.cli import commands as c\n"
        "run = c.COMMAND.run\n"
        "def loud():\n"
        "    import warnings; warnings.warn('careful')\n"
        "    print('python'); os.system('echo process')\n"
        "    return run()\n"
        "c.COMMAND = c.COMMAND._replace(run=loud)\n"
        "sys.exit(cli.main(['commands', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert msgspec.json.decode(done.stdout)["warnings"] == ["careful"]
    assert set(done.stderr.split()) == {"python", "process"}


def test_ctrl_c_ends_with_130_and_a_short_line() -> None:
    code = (
        "import sys, time; from modulelens import cli; from modulelens.cli import commands as c\n"
        "def slow(): sys.stderr.write('on\\n'); sys.stderr.flush(); time.sleep(60)\n"
        "c.COMMAND = c.COMMAND._replace(run=slow)\n"
        "sys.exit(cli.main(['commands']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "on\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted\n"
