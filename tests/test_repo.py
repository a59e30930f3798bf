"""Adding, finding, naming and removing entries, through the public door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, rows

import modulelens as ml
from modulelens.errors import Conflict, NotARepo, NotFound, UsageError


def traced(name: str = "model", *, scale: float = 1.0) -> ml.Trace:
    torch.manual_seed(0)
    model = zoo.CalledTwice().eval()
    with torch.no_grad():
        model.layer.weight.mul_(scale)
    with ml.trace(model, name=name) as trace:
        model(rows())
    return trace


@pytest.fixture
def repo(tmp_path: Path) -> ml.Repo:
    return ml.Repo(tmp_path / "repo")


def test_adding_verifies_stores_grades_and_reports_progress(repo: ml.Repo) -> None:
    seen: list[tuple[int, int]] = []
    entries = repo.add(
        traced(), tags=["first"], aliases=["baseline"], progress=lambda *at: seen.append(at)
    )
    assert seen == [(i, 6) for i in range(1, 7)]
    assert [e.fqn for e in entries] == ["", "layer", "drop"]
    for entry in entries:
        assert str(entry.grade) == "exact"
        assert entry.metadata.tags == ("first",)
        again = repo[f"{entry.name}@baseline"]
        assert again.metadata == entry.metadata
    assert [e.fqn for e in repo.find({"grade": "exact", "cls": "Linear"})] == ["layer"]
    assert repo.fsck().ok


def test_a_second_trace_makes_versions_and_shares_what_is_equal(repo: ml.Repo) -> None:
    first = repo.add(traced(), verify=False, aliases=["best"])
    size = sum(f.stat().st_size for f in (repo.root / "blobs").rglob("*") if f.is_file())
    second = repo.add(traced(), verify=False)
    again = sum(f.stat().st_size for f in (repo.root / "blobs").rglob("*") if f.is_file())
    assert [e.version for e in first + second] == [1] * 3 + [2] * 3
    assert again < 1.2 * size
    third = repo.add(traced(scale=2.0), verify=False, aliases=["best"])
    assert repo["model/layer"].version == 3
    assert repo["model/layer@v1"].id == first[1].id
    assert repo["model/layer@best"].id == third[1].id
    assert repo[first[1].id].version == 1
    assert repo["model"].fqn == ""
    assert [e.version for e in repo.versions("model/layer")] == [3, 2, 1]
    assert len(repo) == 9
    assert len(list(repo)) == 9
    old, new = repo["model/layer@v1"].rebuild(), repo["model/layer"].rebuild()
    assert torch.equal(old.weight * 2, new.weight)


def test_tags_and_aliases_move_and_are_found(repo: ml.Repo) -> None:
    entries = repo.add(traced(), verify=False)
    repo.tag("model/layer", "slow", "slow", "hot")
    repo.tag(entries[1], "hot")
    assert repo["model/layer"].metadata.tags == ("slow", "hot")
    assert [e.fqn for e in repo.find({"tags": {"$contains": "hot"}})] == ["layer"]
    repo.alias("model/layer", "baseline")
    assert repo.aliases("model/layer") == {"baseline": 1}


@pytest.mark.parametrize("words", [{"tags": "base"}, {"aliases": "base"}, {"tags": ["a", ""]}])
def test_tags_that_are_no_list_of_names_are_refused(repo: ml.Repo, words: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(words))):
        repo.add(traced(), verify=False, **words)
    assert len(repo) == 0
    with pytest.raises(UsageError, match="tags: ' '"):
        repo.tag("model", " ")


def test_removing_keeps_what_others_need(repo: ml.Repo) -> None:
    repo.add(traced(), verify=False)
    repo.add(traced(), verify=False, aliases=["keep"])
    with pytest.raises(Conflict, match="keep"):
        repo.remove("model/layer")
    repo.remove("model/layer@v1")
    repo.remove(repo["model@v1"], force=True)
    repo.gc()
    assert len(repo) == 4
    for entry in repo:
        assert entry.check(), entry
    assert repo.fsck().ok
    assert "model/layer@v1" not in repo
    assert "model/layer" in repo


def test_an_index_is_only_a_cache(repo: ml.Repo) -> None:
    entries = repo.add(traced(), verify=False)
    before = [r.id for r in repo.rows({"params": {"$gt": 0}})]
    for file in repo.root.glob("index.sqlite*"):
        file.unlink()
    again = ml.Repo(repo.root)
    assert again.reindex() == len(entries)
    assert [r.id for r in again.rows({"params": {"$gt": 0}})] == before
    assert again.count() == 3


def test_the_default_repo_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODULELENS_REPO", str(tmp_path / "here"))
    assert ml.Repo().root == tmp_path / "here"
    monkeypatch.delenv("MODULELENS_REPO")
    monkeypatch.chdir(tmp_path)
    assert ml.Repo().root.resolve() == tmp_path / ".modulelens"


def test_odd_names_stay_inside_the_repo_and_are_found(repo: ml.Repo, tmp_path: Path) -> None:
    model = zoo.OddNames()
    for name in ("../../escape", "/absolute", "a@b", "\N{SNOWMAN}", "x" * 500):
        with ml.trace(model, name=name, modules=["", "parts.*"]) as trace:
            model(rows())
        for entry in add_unverified(trace, repo.root):
            assert repo[entry.name].id == entry.id
    assert {p.name for p in tmp_path.iterdir()} <= {"repo", "default-repo"}
    assert repo.fsck().ok


def test_what_is_no_trace_is_not_added(repo: ml.Repo) -> None:
    with pytest.raises(UsageError, match="got a Linear, not a Trace"):
        repo.add(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a reference is text"):
        repo[3]  # type: ignore[index]


@pytest.mark.parametrize("make", [ml.Repo, lambda url: ml.Repo("unused").push(url)])
def test_a_url_of_no_remote_is_refused_by_name(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("nosuch://team/registry", "wandb://"):
        with pytest.raises(UsageError, match=url):
            make(url)  # type: ignore[operator]


def test_a_reference_to_nothing_says_what_is_close(repo: ml.Repo) -> None:
    repo.add(traced(), verify=False)
    with pytest.raises(NotFound, match="no entry 'model/laier'") as caught:
        repo["model/laier"]
    assert "model/layer" in caught.value.did_you_mean
    assert "modulelens ls" in caught.value.hint
    with pytest.raises(NotFound, match="has no version or alias 'v7'"):
        repo["model/layer@v7"]
    assert "model/laier" not in repo


def test_a_repo_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("MODULELENS_REPO", "lens")
    monkeypatch.chdir(tmp_path / "first")
    first, other = ml.Repo(), ml.Repo(Path("..") / "other")
    [*_, entry] = first.add(traced("one"), verify=False)
    monkeypatch.chdir(tmp_path / "second")
    (tmp_path / "second" / "lens").mkdir()
    second = ml.Repo()
    second.add(traced("two"), verify=False)
    first.add(traced("three"))
    other.add(traced("four"), verify=False)
    monkeypatch.chdir(tmp_path)
    assert [sorted({e.model for e in repo}) for repo in (first, second, other)] == [
        ["one", "three"],
        ["two"],
        ["four"],
    ]
    assert entry.check() and entry.check(timeout_s=60)
    assert (entry.id in ml.Repo("first/lens"), entry.id in ml.Repo("second/lens")) == (True, False)
    assert {p.name for p in tmp_path.iterdir()} == {"first", "second", "other"}


def test_a_candidate_that_goes_elsewhere_is_judged_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ml.Repo("lens").add(traced(), verify=False)
    file = tmp_path / "away.py"
    file.write_text(
        "import os\nos.chdir('/')\ndef same(module, x): return module(x)\n"
        "def other(module, x): os.chdir('/tmp'); return module(x) + 1\n"
    )
    entry = ml.Repo("lens")["model/layer"]
    assert entry.check("away.py:same").status is ml.Status.EXACT
    assert entry.check("away.py:other").status is ml.Status.MISMATCH_VALUE
    watch = entry.watch("away.py:same")
    assert next(watch).status is ml.Status.EXACT
    monkeypatch.chdir("/")
    file.write_text(file.read_text().replace("return module(x)\n", "return module(x) * 2\n"))
    assert next(watch).status is ml.Status.MISMATCH_VALUE
    watch.close()


def test_a_home_is_found_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ml.Repo("~/deep/lens").root == tmp_path / "deep" / "lens"
    assert ml.Repo(Path("~") / "lens").root == tmp_path / "lens"
    monkeypatch.setenv("MODULELENS_REPO", "~/third")
    assert ml.Repo().root == tmp_path / "third"


@pytest.mark.parametrize(
    "place", ["/proc/self/lens", "/dev/null/lens", "~nobody-of-that-name/lens", "a\0b", "x" * 5000]
)
def test_a_place_where_no_repo_can_be_is_refused_by_name(place: str) -> None:
    with pytest.raises(NotARepo, match=r"cannot be opened or made") as caught:
        ml.Repo(place)
    assert place[:20] in caught.value.message
    assert "folder" in caught.value.hint


@pytest.mark.parametrize("place", [3, b"lens", ("lens",)])
def test_what_is_no_path_is_refused_by_name(place: Any) -> None:
    with pytest.raises(UsageError, match="a repo is a folder"):
        ml.Repo(place)


@pytest.mark.parametrize("wrong", [3, None, "", " ", b"best", ("a", "b")])
def test_a_word_that_is_none_is_refused_by_name(repo: ml.Repo, wrong: Any) -> None:
    [*_, entry] = repo.add(traced(), verify=False)
    for use in (
        lambda: repo.alias(entry, wrong),
        lambda: repo.tag(entry, wrong),
        lambda: repo.add(traced(), aliases=[wrong]),
    ):
        with pytest.raises(UsageError, match="is no name"):
            use()
    assert repo.aliases(entry) == {}


@pytest.mark.parametrize("wrong", ["model/layer", 3, None])
def test_what_is_no_entry_is_refused_by_name(repo: ml.Repo, wrong: Any) -> None:
    [*_, entry] = repo.add(traced(), verify=False)
    with pytest.raises(UsageError, match="which is no entry"):
        entry.diff(wrong)
    if not isinstance(wrong, str):
        for use in (repo.remove, repo.versions, repo.tag, repo.aliases, repo.__getitem__):
            with pytest.raises(UsageError, match="a reference is text"):
                use(wrong)
