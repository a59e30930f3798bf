"""Objects of a remote that never change, kept on this machine, so that each is read once."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path


def cache_folder(url: str) -> Path:
    """Where what comes from a remote is kept: below `$MODULELENS_CACHE`, else the user's cache."""
    place = os.environ.get("MODULELENS_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.md5(url.encode(), usedforsecurity=False).hexdigest()[:16]
    return Path(place or f"{home}/modulelens").expanduser() / name


class Seen:
    """Bytes by name, in one file that may be deleted at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, bytes]:
        """All that is kept."""
        return dict(self._run("SELECT name, data FROM seen"))

    def keep(self, new: Mapping[str, bytes]) -> None:
        """Adds to it, where that is possible."""
        if new:
            self._run("INSERT OR REPLACE INTO seen VALUES (?, ?)", list(new.items()))

    def _run(self, sql: str, rows: Sequence[tuple[str, bytes]] = ()) -> list[tuple[str, bytes]]:
        # A folder that cannot be written, or a file that is no table, costs time and nothing else.
        with suppress(OSError, sqlite3.Error):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path)) as db, db:
                db.execute("CREATE TABLE IF NOT EXISTS seen (name TEXT PRIMARY KEY, data BLOB)")
                return (db.executemany(sql, rows) if rows else db.execute(sql)).fetchall()
        return []
