"""index.sqlite, a cache of the entries' files: opened, kept current, rebuilt when damaged.

How rows lie in it is the matter of table.py.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from modulelens.store import table
from modulelens.store.facts import Row
from modulelens.store.filesystem import is_local
from modulelens.store.layout import Layout
from modulelens.store.locks import locked
from modulelens.store.query import Filter

_BUSY_S = 30.0
_CACHE_KIB = 64 * 1024
#: How often work starts over because somebody deleted the file meanwhile.
_TRIES = 10

_LOGS = ("-wal", "-journal")
#: Connections that a fork inherited: closing them here would break them for the parent.
_FORKED: list[sqlite3.Connection] = []

T = TypeVar("T")
#: Rows of a collection as its files say; of all its versions where none are given.
Reader = Callable[[str, "Iterable[int] | None"], dict[int, Row]]


class Index:
    """The search index of one repo, rebuilt by itself when it is missing or damaged.

    In a repo that cannot be written it lives in memory, filled from index.sqlite where possible.
    """

    def __init__(self, layout: Layout, read: Reader, *, writable: bool) -> None:
        self._layout = layout
        self._read = read
        self._writable = writable
        self._mutex = threading.RLock()
        self._opened: tuple[int, ...] = ()
        self._held: list[tuple[int, sqlite3.Connection]] = []  # one at most, and its process
        weakref.finalize(self, _close, self._held, layout.index_lock if writable else None)
        self._words = table.Words()

    def find(self, filter: Filter, *, limit: int | None = None, offset: int = 0) -> list[Row]:
        """Matching rows in the natural order of their names, the newest version first."""
        where, params = table.compile(filter)
        params += [-1 if limit is None else limit, offset]
        return self._run(lambda db: table.read_rows(db, self._words, table.select(where), params))

    def count(self, filter: Filter) -> int:
        """Number of matching rows."""
        where, params = table.compile(filter)
        sql = f"SELECT COUNT(*) FROM entries WHERE {where}"
        return int(self._run(lambda db: db.execute(sql, params).fetchone())[0])

    def names(self, contains: str = "", limit: int = 5000) -> list[str]:
        """Names of collections that contain a text, in their natural order."""
        sql = "SELECT DISTINCT name FROM entries WHERE instr(name, ?) ORDER BY sort LIMIT ?"
        found = self._run(lambda db: db.execute(sql, (contains, limit)).fetchall())
        return [name for (name,) in found]

    def refresh(
        self, changes: Mapping[str, Iterable[int] | None], read: Reader | None = None
    ) -> bool:
        """Makes the rows of collections, or of some versions of them, what their files say.

        False, with a warning, when the index cannot be written now.
        """
        try:
            self._use(lambda db: self._write(db, changes.items(), read or self._read))
        except sqlite3.OperationalError as error:
            message = f"{self._layout.index} is behind and will catch up: {error}"
            warnings.warn(message, stacklevel=5)
            return False
        return True

    def open(self) -> None:
        """Builds the file where it is missing: while there are few entries that is cheap."""
        with suppress(sqlite3.OperationalError):
            self._use(lambda _: None)

    def rebuild(self) -> int:
        """Builds the index anew from the entries' files; returns the number of rows."""
        with self._mutex, self._lock(shared=False):
            return self._create()

    def close(self) -> None:
        """Closes the connection; the next use opens it again."""
        with self._mutex:
            self._words.clear()
            _close(self._held, self._layout.index_lock if self._writable else None)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._mutex:
            try:
                return self._use(work)
            except sqlite3.OperationalError:
                # Even reading needs a log and a lock file; on a full disk there is no room for it.
                if not self._writable:
                    raise
            self.close()
            self._writable = False
            try:
                return self._use(work)
            finally:
                self.close()
                self._writable = True

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._mutex:
            rest = _TRIES
            while True:
                rest -= 1
                try:
                    with self._connected() as db:
                        return work(db)
                except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
                    if _is_damage(error) and rest:
                        message = f"{self._layout.index} is damaged and is rebuilt: {error}"
                        warnings.warn(message, stacklevel=6)
                        self.rebuild()
                    elif isinstance(error, sqlite3.OperationalError) and rest and self._moved():
                        self.close()
                    else:
                        raise

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        # Locked, so that nobody replaces the file, or its log, while it is opened and used.
        with self._lock(shared=True):
            if (self._held and self._state() == self._opened) or self._attach():
                yield self._held[0][1]
                return
        with self._lock(shared=False):
            # Somebody else may have built it while this process waited.
            if not self._attach():
                self._create()
            yield self._held[0][1]

    def _lock(self, *, shared: bool) -> Any:
        return locked(self._layout.index_lock, shared=shared) if self._writable else nullcontext()

    def _state(self) -> tuple[int, ...]:
        # Another process may have deleted or rebuilt the file, or this one may be a fork.
        try:
            info = self._layout.index.stat()
        except FileNotFoundError:
            return (os.getpid(),)
        if self._writable:
            return (os.getpid(), info.st_ino)
        return (os.getpid(), info.st_ino, info.st_mtime_ns, info.st_size)

    def _moved(self) -> bool:
        return self._writable and (not self._layout.index.exists() or self._state() != self._opened)

    def _hold(self, db: sqlite3.Connection) -> sqlite3.Connection:
        self._held.append((os.getpid(), db))
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        return db

    def _attach(self) -> bool:
        """Opens the file that is there; False where it has to be built."""
        _drop(self._held)
        self._words.clear()
        self._opened = self._state()
        path, healthy = self._layout.index, False
        # Without writing, what a log holds cannot be read.
        logs = () if self._writable else _LOGS
        if not path.exists() or any(Path(f"{path}{end}").exists() for end in logs):
            return False
        db = _open(f"{path.absolute().as_uri()}?{'mode=rw' if self._writable else 'immutable=1'}")
        try:
            healthy = table.is_ours(db)
            if healthy and self._writable:
                self._hold(db)
            elif healthy:
                db.backup(self._hold(_open(":memory:")))
        except sqlite3.DatabaseError as error:
            healthy = False
            _drop(self._held)
            if isinstance(error, sqlite3.OperationalError):  # locked, or a full disk
                raise
        finally:
            if not (healthy and self._writable):
                db.close()
        return healthy

    def _create(self) -> int:
        _drop(self._held)
        self._words.clear()
        path = self._layout.index
        try:
            if self._writable:
                for end in ("", "-shm", *_LOGS):
                    Path(f"{path}{end}").unlink(missing_ok=True)
                db = self._hold(_open(f"{path.absolute().as_uri()}?mode=rwc"))
                # The log of WAL is shared memory, which network file systems do not have.
                db.execute(f"PRAGMA journal_mode = {'WAL' if is_local(path.parent) else 'DELETE'}")
            else:
                db = self._hold(_open(":memory:"))
            self._opened = self._state()
            everything = ((collection, None) for collection in self._layout.collections())
            return self._write(db, everything, self._read, table.TABLES)
        except BaseException:
            _drop(self._held)
            raise

    def _write(
        self,
        db: sqlite3.Connection,
        changes: Iterable[tuple[str, Iterable[int] | None]],
        read: Reader,
        before: Sequence[str] = (),
    ) -> int:
        written = 0
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in before:
                db.execute(statement)
            for collection, versions in changes:
                rows = read(collection, versions)
                table.keep_rows(db, collection, rows, versions)
                for row in rows.values():
                    table.put_row(db, self._words, collection, row)
                written += len(rows)
            db.execute("COMMIT")
        except BaseException:
            self._words.clear()
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return written


def _is_damage(error: Exception) -> bool:
    # The subclasses of DatabaseError are no damage, but for a text that is none.
    exact = type(error) is sqlite3.DatabaseError or isinstance(error, msgspec.MsgspecError)
    return exact or str(error).startswith("Could not decode to UTF-8")


def _open(uri: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        uri, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, uri=uri[0] != ":"
    )
    db.create_function("regexp", 2, _regexp, deterministic=True)
    return db


def _close(held: list[tuple[int, sqlite3.Connection]], lock: Path | None) -> None:
    # Closing removes the log by its name, which must not be that of an index just rebuilt.
    with locked(lock, shared=True) if held and lock and lock.exists() else nullcontext():
        _drop(held)


def _drop(held: list[tuple[int, sqlite3.Connection]]) -> None:
    for pid, db in held:
        if pid == os.getpid():
            db.close()
        else:
            _FORKED.append(db)
    held.clear()


_compiled = lru_cache(maxsize=64)(re.compile)


def _regexp(pattern: str, text: str | None) -> bool:
    return text is not None and _compiled(pattern).search(text) is not None
