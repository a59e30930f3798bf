"""outbox.sqlite: what is to go to which remote, and how far it is. One worker drains it.

It makes pushes outlive the process, the network and the remote. A row that is lost costs a look at
the remote: whatever arrived is known there by its identity.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from modulelens.records import Metadata
from modulelens.store.filesystem import is_local
from modulelens.store.remote.names import dump, load, names_of
from modulelens.store.remote.seam import Version

WAITING, SENT, FAILED, PULLED = "waiting", "sent", "failed", "pulled"
_BUSY_S = 30.0
_TABLE = """CREATE TABLE IF NOT EXISTS outbox (
    remote TEXT NOT NULL, entry TEXT NOT NULL, capture TEXT NOT NULL, made TEXT NOT NULL,
    state TEXT NOT NULL,
    identity TEXT NOT NULL DEFAULT '', tries INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL DEFAULT 0, version INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '', asks INTEGER NOT NULL DEFAULT 1,
    names TEXT, again INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (remote, entry)
) WITHOUT ROWID"""
#: Columns that tables of earlier versions lack.
_ADDED = {"names": "TEXT", "again": "INTEGER NOT NULL DEFAULT 0"}
_INDEXES = (
    "CREATE INDEX IF NOT EXISTS waiting ON outbox (remote, state, made, entry)",
    "CREATE INDEX IF NOT EXISTS captures ON outbox (remote, capture)",
)


class Parcel(msgspec.Struct, frozen=True):
    """One entry on its way to one remote.

    `state` is "waiting", "sent", "failed" or "pulled"; `capture` is the trace it is of;
    `identity` and `version` are those it was sent or pulled as; `due` is when to try again
    (seconds since the epoch); `asks` counts how often it was asked for. `names` are the tags and
    aliases that it had then, as JSON; None: it was never there. `again`: also what is there
    already is sent.
    """

    remote: str
    entry: str
    capture: str
    state: str
    identity: str
    tries: int
    due: float
    version: int
    error: str
    asks: int
    names: str | None
    again: int


class Outbox:
    """The table of one repo; safe for several processes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, remote: str, entries: Iterable[Metadata], *, again: bool = False) -> None:
        """Puts entries in, also those that failed or were sent: they may differ.

        With `again`, what is known of an earlier sending is forgotten.
        """
        forget = ", identity = '', version = 0, names = NULL, again = 1" if again else ""
        rows = [(remote, e.id, e.trace_id, e.created, WAITING, again) for e in entries]
        with self._open() as db:
            db.executemany(
                "INSERT INTO outbox (remote, entry, capture, made, state, again)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET state = excluded.state,"
                f" tries = 0, due = 0, error = '', asks = asks + 1{forget}",
                rows,
            )

    def came(self, remote: str, pairs: Iterable[tuple[Version, Metadata]]) -> None:
        """Entries that are here and at the remote: the names that they have there are no news."""
        with self._open() as db:
            for version, entry in pairs:
                key, names = (remote, entry.id), names_of(version.row.tags, version.row.aliases)
                sql = "SELECT names FROM outbox WHERE remote = ? AND entry = ?"
                (old,) = db.execute(sql, key).fetchone() or (None,)
                known = version.identity, version.version, dump(names | load(old or "[]"))
                db.execute(
                    "INSERT INTO outbox (remote, entry, capture, made, state, identity, version,"
                    " names) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET identity ="
                    " excluded.identity, version = excluded.version, names = excluded.names",
                    (*key, entry.trace_id, entry.created, PULLED, *known),
                )

    def next(self, remote: str) -> list[Parcel]:
        """What waits of the oldest capture: numbers there follow the order of those here."""
        sql = (
            "SELECT capture FROM outbox WHERE remote = ? AND state = ? ORDER BY made, entry LIMIT 1"
        )
        with self._open() as db:
            found = db.execute(sql, (remote, WAITING)).fetchone()
        return self.all(remote, (WAITING,), *found) if found else []

    def waiting(self, remote: str) -> int:
        """How many entries wait."""
        sql = "SELECT count(*) FROM outbox WHERE remote = ? AND state = ?"
        with self._open() as db:
            return int(db.execute(sql, (remote, WAITING)).fetchone()[0])

    def all(
        self,
        remote: str = "",
        states: Sequence[str] = (WAITING, SENT, FAILED),
        capture: str | None = None,
    ) -> list[Parcel]:
        """Everything, or that of one remote, in some states, of one capture."""
        marks = ", ".join("?" * len(states))
        sql = f"SELECT {', '.join(Parcel.__struct_fields__)} FROM outbox WHERE state IN ({marks})"
        params = list(states)
        for name, value in (("remote", remote or None), ("capture", capture)):
            if value is not None:
                sql, params = f"{sql} AND {name} = ?", [*params, value]
        with self._open() as db:
            rows = db.execute(f"{sql} ORDER BY remote, capture, entry", params).fetchall()
        return [Parcel(*row) for row in rows]

    def begun(self, parcel: Parcel, identity: str) -> None:
        """It is put now: should it be there later, it came from here."""
        self._set(parcel, identity=identity)

    def sent(self, parcel: Parcel, identity: str, version: int, names: str) -> None:
        """It is there, unless it was asked for again meanwhile (then it is looked at again)."""
        what: dict[str, str | float] = {"identity": identity, "version": version, "names": names}
        self._set(parcel, state=SENT, error="", again=0, **what)

    def failed(self, parcel: Parcel, error: str) -> None:
        """It will never be there: trying again would fail again."""
        self._set(parcel, state=FAILED, tries=parcel.tries + 1, error=error)

    def later(self, parcel: Parcel, error: str, after_s: float) -> None:
        """It is to be tried again."""
        due = time.time() + after_s
        self._set(parcel, state=WAITING, tries=parcel.tries + 1, due=due, error=error)

    def stuck(self, remote: str, error: str) -> None:
        """Nothing of what waits for a remote can be sent before somebody has done something."""
        with self._open() as db:
            db.execute(
                "UPDATE outbox SET error = ? WHERE remote = ? AND state = ?",
                (error, remote, WAITING),
            )

    def _set(self, parcel: Parcel, **fields: str | float) -> None:
        names = ", ".join(f"{name} = ?" for name in fields)
        sql = f"UPDATE outbox SET {names} WHERE remote = ? AND entry = ? AND asks = ?"
        with self._open() as db:
            db.execute(sql, [*fields.values(), parcel.remote, parcel.entry, parcel.asks])

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as db:
            db.execute(
                f"PRAGMA journal_mode = {'WAL' if is_local(self._path.parent) else 'DELETE'}"
            )
            with db:
                db.execute(_TABLE)
                there = {row[1] for row in db.execute("PRAGMA table_info(outbox)")}
                for name in _ADDED.keys() - there:
                    db.execute(f"ALTER TABLE outbox ADD COLUMN {name} {_ADDED[name]}")
                for index in _INDEXES:
                    db.execute(index)
                yield db
