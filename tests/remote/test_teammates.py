"""Two repos and one remote, in any order of acts: what somebody did stays as it was done."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import fsspec
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.remote.conftest import push, records, there
from tests.store.samples import metadata as record_with

from modulelens.errors import NotFound
from modulelens.records import collection_id
from modulelens.store import LocalStore
from modulelens.store.files import digest_of
from modulelens.store.remote import open_remote
from modulelens.store.remote.pull import pull
from modulelens.store.remote.push import record_of

FIRST = collection_id("net", "first")
REPOS, ALIASES = st.integers(0, 1), st.sampled_from(["best", "old", "mine"])
NUMBERS = itertools.count()


class Team(RuleBasedStateMachine):
    """The model: what each version is, which alias was given to which last, and what was removed.

    `asked` are aliases that a repo gave to an entry of its own and has not pushed yet; `sent` maps
    its entries to the versions they were sent or pulled as.
    """

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.remote = open_remote(f"memory://teammates-{next(NUMBERS)}")
        self.repos = [LocalStore(Path(self.folder.name) / name) for name in "ab"]
        self.asked: list[dict[str, str]] = [{}, {}]
        self.sent: list[dict[str, int]] = [{}, {}]
        self.versions: dict[int, str] = {}
        self.removed: set[int] = set()
        self.aliases: dict[str, int] = {}

    def teardown(self) -> None:
        if "folder" in self.__dict__:
            self.folder.cleanup()
            memory = fsspec.filesystem("memory")
            for path in memory.find(self.remote.url.partition("://")[2]):
                memory.rm_file(path)

    def entries(self, who: int) -> list[str]:
        """In the order in which they are sent: captures as they were made, then by number."""
        ordered = sorted(records(self.repos[who]), key=lambda r: (r.created, r.version))
        return [record.id for record in ordered]

    @rule(who=REPOS, alias=st.none() | ALIASES)
    def capture(self, who: int, alias: str | None) -> None:
        number = next(NUMBERS)
        record = record_with("net", "first", trace_id=f"trace{number}", depth=number)
        record = msgspec.structs.replace(record, created=f"2027-01-01T00:{number:06}")
        given = [alias] if alias else []
        (entry,) = self.repos[who].put_entries([(record, {})], aliases=given)
        self.asked[who] |= dict.fromkeys(given, entry.id)

    @rule(who=REPOS, data=st.data(), alias=ALIASES)
    def name_here(self, who: int, data: st.DataObject, alias: str) -> None:
        if entries := self.entries(who):
            entry = data.draw(st.sampled_from(entries))
            if self.repos[who].aliases(FIRST).get(alias) != int(entry.split("/")[1]):
                self.repos[who].alias(entry, alias)
                self.asked[who][alias] = entry

    @rule(who=REPOS, data=st.data())
    def measure(self, who: int, data: st.DataObject) -> None:
        if entries := self.entries(who):
            entry = data.draw(st.sampled_from(entries))
            number = next(NUMBERS)
            self.repos[who].update(entry, lambda m: msgspec.structs.replace(m, params=number))

    @rule(data=st.data(), alias=ALIASES)
    def name_there(self, data: st.DataObject, alias: str) -> None:
        if self.versions:
            number = data.draw(st.sampled_from(sorted(self.versions)))
            self.remote.alias(self.remote.get(FIRST, str(number)), add=[alias], remove=())
            self.aliases[alias] = number

    @rule(data=st.data())
    def remove_there(self, data: st.DataObject) -> None:
        if self.versions:
            number = data.draw(st.sampled_from(sorted(self.versions)))
            self.remote.delete(self.remote.get(FIRST, str(number)), force=True)
            del self.versions[number]
            self.removed.add(number)
            self.aliases = {a: n for a, n in self.aliases.items() if n != number}

    @rule(who=REPOS)
    def push(self, who: int) -> None:
        store, sent = self.repos[who], self.sent[who]
        known = {identity: number for number, identity in self.versions.items()}
        new = 0
        for entry in self.entries(who):
            identity, before = digest_of(record_of(store.metadata(entry))), sent.get(entry)
            if identity not in known and before in self.removed:
                continue
            held = [a for a, n in self.aliases.items() if n == before]
            if identity not in known:
                new += 1
                number = 1 + max((*self.versions, *self.removed), default=0)
                self.versions[number], known[identity] = identity, number
                mine = {a for a, n in store.aliases(FIRST).items() if f"{FIRST}/{n}" == entry}
                self.aliases |= dict.fromkeys(mine.intersection(held), number)
            sent[entry] = known[identity]
            for alias in [a for a, asked in self.asked[who].items() if asked == entry]:
                self.aliases[alias] = known[identity]
                del self.asked[who][alias]
        done = push(store, self.remote.url)
        assert (done.sent, done.waiting, done.failed) == (new, 0, ())

    @rule(who=REPOS)
    def pull(self, who: int) -> None:
        store, found = self.repos[who], there(self.remote)
        came = pull(store, self.remote, found)
        for version, record in zip(found, came, strict=True):
            self.sent[who][record.id] = version.version
            for alias in version.row.aliases:
                self.asked[who].pop(alias, None)

    @invariant()
    def agrees(self) -> None:
        if "folder" not in self.__dict__:
            return
        found = {v.version: v for v in there(self.remote)}
        assert {n: v.identity for n, v in found.items()} == self.versions
        assert {a: n for n, v in found.items() for a in v.row.aliases} == self.aliases
        if found:
            newest = max(found.values(), key=lambda v: v.age)
            assert self.remote.get(FIRST).identity == newest.identity
        for alias in {"best", "old", "mine"} - self.aliases.keys():
            try:
                number = self.remote.get(FIRST, alias).version
            except NotFound:
                continue
            raise AssertionError(f"{alias} is at {number}")


Team.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_teammates = Team.TestCase
