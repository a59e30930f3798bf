"""Whatever lies in a repo's files: the right answer or a named error, and nothing else happens.

`MODULELENS_FUZZ=50 pytest tests/fuzz --timeout 0` tries fifty times as many.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz import attacks, target

TIMES = int(os.environ.get("MODULELENS_FUZZ", "1"))


class Victim(NamedTuple):
    """A sound repo, what reading it gives, and room for copies that are attacked."""

    sample: Path
    room: Path
    ids: dict[str, str]
    truth: target.Seen

    def copy(self) -> Path:
        return attacks.copy(self.sample, self.room / "repo")

    def read(self, only: str = "") -> target.Seen:
        """Reads the attacked copy; holds what has to hold whatever was done to it."""
        seen = target.read_all(self.room / "repo", self.room / "out", only)
        assert not seen.bare, next(iter(seen.bare.items()))
        assert not seen.broken
        assert seen.status == 0, "ended by a signal: endless, or out of memory"
        return seen

    def spare(self, seen: target.Seen) -> None:
        """The entry of the other model is as it was."""
        for name, answer in seen.answers.items():
            if name.startswith("good "):
                assert answer == self.truth.answers[name], name


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    room = tmp_path_factory.mktemp("fuzz")
    (room / "out").mkdir()
    repo = target.build(room / "sample")
    ids = {ref: repo[ref].id for ref in (*target.ATTACKED, target.GOOD)}
    repo._store.close()
    target.warm_up(attacks.copy(room / "sample", room / "warm"), room / "out")
    attacks.copy(room / "sample", room / "repo")
    truth = target.read_all(room / "repo", room / "out")
    yield Victim(room / "sample", room, ids, truth)


def tries(number: int) -> settings:
    """So many examples, the same ones each time."""
    return settings(
        max_examples=number * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


seeds = st.integers(0, 2**32)


def test_the_truth_has_no_flaw(victim: Victim) -> None:
    assert victim.truth.status == 0
    assert not victim.truth.bare
    assert not victim.truth.broken
    refused = {name for name, answer in victim.truth.answers.items() if answer.isupper()}
    assert refused == {"good init"}  # made before its constructor was watched


@tries(25)
@given(seed=seeds)
def test_forged_records(victim: Victim, seed: int) -> None:
    rng, root = random.Random(seed), victim.copy()
    record = root / "entries" / victim.ids[rng.choice(target.ATTACKED)] / "metadata.json"
    attacks.write(record, attacks.forge(record.read_text(), rng))
    if seed % 2:
        (root / "index.sqlite").unlink()
    victim.spare(victim.read())


def test_a_record_without_calls(victim: Victim) -> None:
    root = victim.copy()
    record = root / "entries" / victim.ids["net@v1"] / "metadata.json"
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"calls": []}))
    victim.spare(victim.read())


@tries(20)
@given(seed=seeds)
def test_forged_nodes(victim: Victim, seed: int) -> None:
    rng, root = random.Random(seed), victim.copy()
    entry = root / "entries" / victim.ids[rng.choice(target.ATTACKED)]
    digests = attacks.documents(root, json.loads((entry / "metadata.json").read_bytes()))
    digest = rng.choice(digests)
    text = (root / "blobs" / digest[:2] / digest).read_text()
    attacks.plant(root, entry, digest, attacks.forge(text, rng).encode("latin-1"))
    victim.spare(victim.read())


@tries(15)
@given(seed=seeds)
def test_forged_small_files(victim: Victim, seed: int) -> None:
    rng, root = random.Random(seed), victim.copy()
    collection = victim.ids["net@v1"].partition("/")[0]
    file = rng.choice([root / "format.json", root / "entries" / collection / "aliases.json"])
    attacks.write(file, attacks.forge(file.read_text(), rng))
    marker = rng.choice(["", collection, "../../x", "a" * 32, "\ud800", "x" * 10_000, "\0"])
    (root / "changes" / "dead").write_bytes(marker.encode("utf-8", "surrogatepass"))
    victim.read("l")  # the questions about the repo, and some about each entry


@tries(25)
@given(seed=seeds)
def test_damaged_bytes(victim: Victim, seed: int) -> None:
    rng, root = random.Random(seed), victim.copy()
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]
    files.sort(key=lambda path: str(path.relative_to(root)))
    if seed % 2:
        files = [path for path in files if path.suffix in (".json", ".sqlite", ".pt")]
    file = rng.choice(files)
    file.write_bytes(attacks.damage(file.read_bytes(), rng))
    seen = victim.read()
    for name, answer in seen.answers.items():
        searched = name.startswith(("good rows", "good find"))
        if searched and (file.name == "index.sqlite" or victim.ids["good"] in str(file)):
            continue  # another row, which fsck names; or none, for a record that cannot be read
        if not name.startswith("list ") and not answer.isupper():
            assert answer == victim.truth.answers[name], (name, file)
