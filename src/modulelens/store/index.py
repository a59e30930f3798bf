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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from modulelens.store.facts import Row
from modulelens.store.filesystem import is_local
from modulelens.store.layout import Layout
from modulelens.store.locks import locked
from modulelens.store.query import Filter
from modulelens.store.sql import PLAIN, compile
from modulelens.store.table import TABLES, VERSION, Words, keep_rows, put_row, read_rows, select

_BUSY_S = 30.0
_CACHE_KIB = 64 * 1024
#: How often a write starts over because somebody deleted the file meanwhile.
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
        self._words = Words()

    def find(
        self,
        filter: Filter,
        *,
        limit: int | None = None,
        offset: int = 0,
        newest_only: bool = False,
    ) -> list[Row]:
        """Matching rows in the natural order of their names, the newest version first."""
        where, params = compile(filter)
        params += [-1 if limit is None else limit, offset]
        sql = select(where, newest_only=newest_only)
        return self._run(lambda db: read_rows(db, self._words, sql, params))

    def count(self, filter: Filter) -> int:
        """Number of matching rows."""
        where, params = compile(filter)
        sql = f"SELECT COUNT(*) FROM entries WHERE {where}"
        return int(self._run(lambda db: db.execute(sql, params).fetchone())[0])

    def names(self, contains: str = "", limit: int = 5000) -> list[str]:
        """Names of collections that contain a text, in their natural order."""
        sql = "SELECT DISTINCT name FROM entries WHERE instr(name, ?) ORDER BY sort LIMIT ?"
        return [name for (name,) in self._run(lambda db: db.execute(sql, (contains, limit)))]

    def ids(self) -> set[str]:
        """Ids of all indexed entries."""
        sql = f"SELECT {PLAIN['id']} FROM entries"
        return {name for (name,) in self._run(lambda db: db.execute(sql))}

    def refresh(self, collection: str, versions: Iterable[int] | None = None) -> bool:
        """Makes the rows of these versions (all, where none are given) what the files say.

        False, with a warning, when the index cannot be written now.
        """
        with self._mutex:
            for rest in reversed(range(_TRIES)):
                try:
                    if self._try_refresh(collection, versions):
                        return True
                except sqlite3.OperationalError as error:
                    if rest and self._moved():
                        continue
                    message = f"{self._layout.index} is behind and will catch up: {error}"
                    warnings.warn(message, stacklevel=5)
                    return False
                except sqlite3.DatabaseError as error:
                    self._rebuild_damaged(error)
                    return True
            return False

    def _try_refresh(self, collection: str, versions: Iterable[int] | None) -> bool:
        db = self._ensure()
        # Shared with other writers; a rebuild reads all files under the exclusive lock.
        with self._lock(shared=True):
            if self._moved():
                return False
            self._write(db, [(collection, versions)])
            return True

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
                return work(self._ensure())
            except sqlite3.OperationalError:
                # Even reading needs a log and a lock file; on a full disk there is no room for it.
                if not self._writable:
                    raise
                return self._run_in_memory(work)
            except sqlite3.DatabaseError as error:
                self._rebuild_damaged(error)
                return work(self._ensure())

    def _run_in_memory(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self.close()
        self._writable = False
        try:
            return work(self._ensure())
        finally:
            self.close()
            self._writable = True

    def _rebuild_damaged(self, error: sqlite3.DatabaseError) -> None:
        if type(error) is not sqlite3.DatabaseError:  # its subclasses are no damage
            raise error
        warnings.warn(f"{self._layout.index} is damaged and is rebuilt: {error}", stacklevel=6)
        self.rebuild()

    def _ensure(self) -> sqlite3.Connection:
        with self._mutex:
            if not self._held or self._state() != self._opened:
                self.close()
                # Locked, so that nobody replaces the log between opening the file and the log.
                with self._lock(shared=True):
                    healthy = self._connect()
                if not healthy:
                    with self._lock(shared=False):
                        # Somebody else may have built it while this process waited.
                        if not self._connect():
                            self._create()
            return self._held[0][1]

    def _lock(self, *, shared: bool) -> Any:
        return locked(self._layout.index_lock, shared=shared) if self._writable else _no_lock()

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

    def _connect(self) -> bool:
        self._opened = self._state()
        try:
            return self._attach()
        except sqlite3.OperationalError:  # locked, or a full disk
            if self._moved():
                return False
            raise
        except sqlite3.DatabaseError:
            return False

    def _hold(self, db: sqlite3.Connection) -> sqlite3.Connection:
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._held.append((os.getpid(), db))
        return db

    def _attach(self) -> bool:
        path = self._layout.index
        if not path.exists():
            return False
        # Without writing, what a log holds cannot be read.
        if not self._writable and any(Path(f"{path}{end}").exists() for end in _LOGS):
            return False
        mode = "mode=rw" if self._writable else "immutable=1"
        db: sqlite3.Connection | None = _open(f"{path.absolute().as_uri()}?{mode}")
        assert db is not None
        try:
            if db.execute("PRAGMA user_version").fetchone() != (VERSION,):
                return False
            if self._writable:
                self._hold(db)
                db = None
            else:
                db.backup(self._hold(_open(":memory:")))
            return True
        finally:
            if db is not None:
                db.close()

    def _create(self) -> int:
        _drop(self._held)
        self._words.clear()
        path = self._layout.index
        if self._writable:
            for end in ("", "-shm", *_LOGS):
                Path(f"{path}{end}").unlink(missing_ok=True)
        db = self._hold(
            _open(f"{path.absolute().as_uri()}?mode=rwc" if self._writable else ":memory:")
        )
        if self._writable:
            # The log of WAL is shared memory, which network file systems do not have.
            db.execute(f"PRAGMA journal_mode = {'WAL' if is_local(path.parent) else 'DELETE'}")
        self._opened = self._state()
        everything = ((collection, None) for collection in self._layout.collections())
        try:
            return self._write(db, everything, before=TABLES)
        except BaseException:
            _drop(self._held)
            raise

    def _write(
        self,
        db: sqlite3.Connection,
        changes: Iterable[tuple[str, Iterable[int] | None]],
        before: Sequence[str] = (),
    ) -> int:
        written = 0
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in before:
                db.execute(statement)
            for collection, versions in changes:
                # Read inside the transaction: who comes second then writes what is newer.
                wanted = None if versions is None else list(versions)
                rows = self._read(collection, wanted)
                keep_rows(db, collection, rows, wanted)
                for row in rows.values():
                    put_row(db, self._words, collection, row)
                written += len(rows)
            db.execute("COMMIT")
        except BaseException:
            self._words.clear()
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return written


def _open(uri: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        uri, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, uri=uri[0] != ":"
    )
    db.create_function("regexp", 2, _regexp, deterministic=True)
    return db


def _close(held: list[tuple[int, sqlite3.Connection]], lock: Path | None) -> None:
    # Closing removes the log by its name, which must not be that of an index just rebuilt.
    with locked(lock, shared=True) if held and lock and lock.exists() else _no_lock():
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


@contextmanager
def _no_lock() -> Iterator[None]:
    yield
