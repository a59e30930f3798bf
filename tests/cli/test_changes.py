"""Commands that change labels of entries or remove them, and what they say of damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.shell import Done, modulelens
from tests.cli.test_output import assert_fits_schema
from tests.report.sample import metadata
from tests.store.samples import put_entry

from modulelens.store import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two versions of one entry, the second one with an alias."""
    store = LocalStore(tmp_path / "repo")
    put_entry(store, metadata(fqn="a"), {})
    put_entry(store, metadata(fqn="a"), {}, aliases=("good",))
    store.close()
    return store.root


def run(root: Path, *words: str) -> Done:
    done = modulelens(*words, "--repo", str(root), "--json")
    if not done.code:
        assert_fits_schema(words[0], done.out)
    return done


def test_tags_are_added(root: Path) -> None:
    old = LocalStore(root).find()[-1].tags
    tagged = run(root, "tag", "dlrm/a@v1", "fp32", "slow").json["data"]
    assert tuple(tagged["tags"]) == (*old, "fp32", "slow")
    assert LocalStore(root).count({"tags": "fp32"}) == 1
    assert run(root, "tag", "dlrm/a@v1", " ").code == 2
    assert run(root, "tag", "dlrm/b", "x").code == 3
    assert run(root, "tag", "dlrm/a").code == 2


def test_an_alias_moves(root: Path) -> None:
    assert run(root, "alias", "dlrm/a@v1", "good").json["data"]["aliases"] == {"good": 1}
    assert LocalStore(root).resolve("dlrm/a@good").endswith("/1")
    for name in ("v3", "", "a@b"):
        assert run(root, "alias", "dlrm/a@v1", name).code == 2


def test_what_an_alias_holds_is_removed_by_force_only(root: Path) -> None:
    refused = run(root, "remove", "dlrm/a")
    assert (refused.code, refused.json["error"]["code"]) == (6, "CONFLICT")
    assert "good" in refused.json["error"]["message"]
    gone = LocalStore(root).resolve("dlrm/a@good")
    assert run(root, "remove", "dlrm/a", "--force").json["data"]["id"] == gone
    assert run(root, "remove", "dlrm/a@v2").code == 3
    assert run(root, "remove", "dlrm/a@v1").code == 0
    assert LocalStore(root).count() == 0


def test_reindex_says_what_it_leaves_out_and_why(root: Path) -> None:
    store = LocalStore(root)
    broken = store.resolve("dlrm/a@v1")
    (root / "entries" / broken / "metadata.json").write_text("{")
    answer = run(root, "reindex").json
    assert answer["data"]["entries"] == 1
    (warning,) = answer["warnings"]
    assert broken in warning
    assert "cannot be read" in warning


def test_an_argument_that_is_no_text_is_named(root: Path) -> None:
    done = modulelens("show", "\udcff", "--repo", str(root), "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "USAGE_ERROR")
