"""Commands that only read records: no torch, whole pages, and a bad entry hides no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.shell import modulelens
from tests.cli.test_output import assert_fits_schema
from tests.report.sample import metadata
from tests.store.samples import put_entry

from modulelens.store import LocalStore


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 entries of one model, two versions of one of another."""
    root = tmp_path_factory.mktemp("records") / "repo"
    store = LocalStore(root)
    for i in range(25):
        put_entry(store, metadata(model="dlrm", fqn=f"tower.layers.{i}.over_arch"), {})
    for params in (10, 2_000_000):
        put_entry(store, metadata(model="llm", fqn="", cls="llm:Attention", params=params), {})
    store.close()
    return root


@pytest.mark.parametrize(
    "words",
    [
        "ls",
        "ls dlrm/tower.layers.1 --limit 5",
        "find params>1e6",
        "find cls~Att.* grade=exact",
        "show llm@v1",
        "show dlrm/tower.layers.3.over_arch --call 0",
        "show llm --source",
        "diff llm@v1 llm@v2",
        "doctor --quick",
        "fsck",
        "reindex",
        "commands",
    ],
)
def test_reading_records_imports_no_torch_and_answers_small(words: str, repo: Path) -> None:
    line = words.split()
    if line[0] != "commands":
        line += ["--repo", str(repo)]
    code = (
        "import sys; from modulelens.cli import main; code = main(sys.argv[1:]);"
        "bad = {'torch', 'numpy'} & set(sys.modules); sys.exit(str(bad) if bad else code)"
    )
    command = [sys.executable, "-c", code, *line]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert 0 < len(plain.stdout) < 8_000
    answer = modulelens(*line, "--json")
    assert answer.code == 0
    assert len(answer.out) < 8_000
    assert_fits_schema(line[0], answer.out)


def test_well_formed_reading_needs_no_typer(repo: Path) -> None:
    code = (
        "import sys; from modulelens.cli import main; main(sys.argv[1:]);"
        "sys.exit('typer' in sys.modules or 'rich' in sys.modules)"
    )
    for words in (["ls"], ["find", "params>1"], ["show", "llm"]):
        command = [sys.executable, "-c", code, *words, "--repo", str(repo)]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_pages_join_to_the_whole(repo: Path) -> None:
    seen: list[str] = []
    offset: int | None = 0
    while offset is not None:
        words = ["ls", "--limit", "10", "--offset", str(offset), "--repo", str(repo), "--json"]
        data = modulelens(*words).json["data"]
        assert data["total"] == 27
        seen += [entry["id"] for entry in data["entries"]]
        offset = data["next_offset"]
    assert len(seen) == len(set(seen)) == 27


def test_the_table_says_how_to_go_on(repo: Path) -> None:
    lines = modulelens("ls", "--limit", "10", "--repo", str(repo)).out.splitlines()
    assert lines[0].split()[:3] == ["ENTRY", "CLASS", "PARAMS"]
    assert len(lines) == 12
    assert lines[-1] == "1-10 of 27 entries; --offset 10 shows more"


def test_found_is_what_was_asked_for(repo: Path) -> None:
    answer = modulelens("find", "params>1e6", "cls=Attention", "--repo", str(repo), "--json").json
    assert [(e["name"], e["version"]) for e in answer["data"]["entries"]] == [("llm", 2)]
    assert answer["next"] == [f"modulelens show llm@v2 --repo {repo}"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["show", "llm@v9"], "NOT_FOUND"),
        (["show", "llm", "--call", "7"], "NOT_FOUND"),
        (["find", "parms>1"], "USAGE_ERROR"),
        (["find", "params"], "USAGE_ERROR"),
        (["ls", "--limit", "0"], "USAGE_ERROR"),
    ],
)
def test_mistakes_are_named(words: list[str], code: str, repo: Path) -> None:
    answer = modulelens(*words, "--repo", str(repo), "--json")
    assert answer.json["error"]["code"] == code
    assert answer.code == {"NOT_FOUND": 3, "USAGE_ERROR": 2}[code]


def test_a_misspelt_entry_gets_a_suggestion(repo: Path) -> None:
    answer = modulelens("show", "dlrm/tower.layers.3.overarch", "--repo", str(repo), "--json")
    assert "dlrm/tower.layers.3.over_arch" in answer.json["error"]["did_you_mean"]


def test_the_environment_names_the_repo(repo: Path) -> None:
    assert modulelens("ls", "--json", MODULELENS_REPO=str(repo)).json["data"]["total"] == 27


def test_reading_creates_no_repo(tmp_path: Path) -> None:
    assert modulelens("ls", "--repo", str(tmp_path / "new")).code == 3
    assert not (tmp_path / "new").exists()


def test_damage_is_found_and_hides_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "repo")
    broken = put_entry(store, metadata(fqn="a"), {})
    put_entry(store, metadata(fqn="b"), {})
    store.close()
    (tmp_path / "repo" / "entries" / broken.id / "metadata.json").write_text("{", encoding="utf-8")
    answer = modulelens("fsck", "--repo", str(tmp_path / "repo"), "--json")
    assert answer.code == 1
    assert answer.json["error"]["code"] == "CORRUPTED"
    assert broken.id in str(answer.json["data"]["problems"])
    assert modulelens("show", "dlrm/b", "--repo", str(tmp_path / "repo")).code == 0
    assert modulelens("show", "dlrm/a@v1", "--repo", str(tmp_path / "repo")).code == 1
