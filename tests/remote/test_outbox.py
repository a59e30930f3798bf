"""The outbox: what is asked for goes once, in order, and nothing that is asked for is forgotten."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.store.samples import Child, metadata

from modulelens.records import Metadata
from modulelens.store.remote.outbox import FAILED, SENT, WAITING, Outbox

URL, OTHER = "s3://team/modules", "wandb://team/registry"


def record(number: int, capture: str = "one", made: str = "") -> Metadata:
    made = made or f"2027-01-01T00:00:{number:02}"
    return metadata("net", f"layer{number}", version=1, trace_id=capture, created=made)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox.sqlite")


def states(outbox: Outbox) -> list[str]:
    return [parcel.state for parcel in outbox.all()]


def test_an_empty_one(outbox: Outbox) -> None:
    assert outbox.next(URL) == outbox.all() == []
    assert outbox.waiting(URL) == 0


def test_a_capture_at_a_time_the_oldest_first(outbox: Outbox) -> None:
    outbox.ask(URL, [record(5, "a"), record(6, "a"), record(3, "b"), record(4, "c")])
    outbox.ask(OTHER, [record(1, "d")])
    order = []
    while parcels := outbox.next(URL):
        order.append(parcels[0].capture)
        assert {parcel.capture for parcel in parcels} == {order[-1]}
        for parcel in parcels:
            outbox.sent(parcel, "0" * 64, 1, "[]")
    assert order == ["b", "c", "a"]
    assert outbox.waiting(URL) == 0
    assert outbox.waiting(OTHER) == 1


def test_asking_again_for_what_was_sent_or_failed(outbox: Outbox) -> None:
    records = [record(1), record(2)]
    outbox.ask(URL, records)
    one, two = outbox.next(URL)
    outbox.sent(one, "0" * 64, 3, "[]")
    outbox.failed(two, "it was removed here")
    assert states(outbox) == [SENT, FAILED]
    outbox.ask(URL, records)
    assert [(p.state, p.tries, p.error) for p in outbox.next(URL)] == [(WAITING, 0, "")] * 2


@pytest.mark.parametrize("end", ["sent", "failed", "later"])
def test_what_is_asked_for_again_while_it_is_sent_is_looked_at_again(
    outbox: Outbox, end: str
) -> None:
    outbox.ask(URL, [record(1)])
    (parcel,) = outbox.next(URL)
    outbox.ask(URL, [record(1)])  # it has a new tag, say
    what = {"sent": ("0" * 64, 1, "[]"), "failed": ("no",), "later": ("away", 60.0)}[end]
    getattr(outbox, end)(parcel, *what)
    (again,) = outbox.next(URL)
    assert (again.state, again.due, again.asks) == (WAITING, 0, 2)
    outbox.sent(again, "0" * 64, 1, "[]")
    assert states(outbox) == [SENT]


def test_later_is_due_later(outbox: Outbox) -> None:
    outbox.ask(URL, [record(1)])
    (parcel,) = outbox.next(URL)
    outbox.later(parcel, "away", 30)
    (parcel,) = outbox.next(URL)
    assert (parcel.tries, parcel.error) == (1, "away")
    assert 20 < parcel.due - time.time() <= 30
    outbox.ask(URL, [record(1)])
    assert outbox.next(URL)[0].due == 0


def test_processes_ask_and_send_at_once(outbox: Outbox, tmp_path: Path) -> None:
    def ask(first: int):
        def work(_: object) -> None:
            for number in range(first, first + 20):
                outbox.ask(URL, [record(number), record(number + 1)])

        return work

    def send(_: object) -> None:
        for _ in range(30):
            for parcel in outbox.next(URL):
                outbox.sent(parcel, "0" * 64, 1, "[]")

    children = [Child(work) for work in (ask(0), ask(10), ask(20), send)]
    assert [child.wait()[0] for child in children] == [0] * 4
    assert len(outbox.all()) == 41
    while parcels := outbox.next(URL):
        for parcel in parcels:
            outbox.sent(parcel, "0" * 64, 1, "[]")
    assert set(states(outbox)) == {SENT}


def test_a_step_reads_its_own_capture_only(outbox: Outbox, tmp_path: Path) -> None:
    """A drain of thousands of captures would else be quadratic."""
    outbox.ask(URL, [record(number, f"{number}") for number in range(300)])
    with sqlite3.connect(tmp_path / "outbox.sqlite") as db:
        plan = "EXPLAIN QUERY PLAN SELECT capture FROM outbox WHERE remote = ? AND state = ?"
        rows = db.execute(f"{plan} ORDER BY made, entry LIMIT 1", (URL, WAITING)).fetchall()
        rows += db.execute(
            "EXPLAIN QUERY PLAN SELECT * FROM outbox WHERE state IN (?) AND remote = ? AND"
            " capture = ? ORDER BY remote, capture, entry",
            (WAITING, URL, "7"),
        ).fetchall()
    db.close()
    text = " / ".join(str(row[-1]) for row in rows)
    assert "SCAN" not in text, text
    assert "waiting" in text or "captures" in text


class AnyOrder(RuleBasedStateMachine):
    """Any sequence of asks, sends, failures and delays, against a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.outbox = Outbox(Path(self.folder.name) / "outbox.sqlite")
        self.model: dict[str, str] = {}
        self.held: list = []

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(numbers=st.sets(st.integers(0, 5), min_size=1))
    def ask(self, numbers: set[int]) -> None:
        records = [record(number, f"{number % 2}") for number in numbers]
        self.outbox.ask(URL, records)
        self.model |= {found.id: WAITING for found in records}
        asked = {found.id for found in records}
        self.held = [parcel for parcel in self.held if parcel.entry not in asked]

    @rule()
    def take(self) -> None:
        self.held = self.outbox.next(URL)

    @rule(end=st.sampled_from([SENT, FAILED, WAITING]))
    def end_one(self, end: str) -> None:
        if not self.held:
            return
        parcel = self.held.pop()
        if end == SENT:
            self.outbox.sent(parcel, "0" * 64, 1, "[]")
        elif end == FAILED:
            self.outbox.failed(parcel, "no")
        else:
            self.outbox.later(parcel, "away", 1)
        self.model[parcel.entry] = end

    @invariant()
    def agrees(self) -> None:
        assert {p.entry: p.state for p in self.outbox.all()} == self.model
        assert self.outbox.waiting(URL) == list(self.model.values()).count(WAITING)
        assert bool(self.outbox.next(URL)) == (WAITING in self.model.values())


AnyOrder.TestCase.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
test_any_order = AnyOrder.TestCase
