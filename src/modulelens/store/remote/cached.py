"""A remote as a repo: found there, fetched when used, kept in a folder of bounded size.

What lies in the folder is a local repo under the remote's own version numbers, so that workers and
other processes open it as any other. A version never changes, so what is there needs no question.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from modulelens.errors import Conflict, ModuleLensError, NotFound, Unavailable, UsageError
from modulelens.records import Metadata
from modulelens.store.facts import Row, natural
from modulelens.store.layout import COLLECTION
from modulelens.store.local import LocalStore
from modulelens.store.query import Filter
from modulelens.store.remote import open_remote
from modulelens.store.remote.examine import examine
from modulelens.store.remote.pull import Fetched, chosen, everything, fetch, fetch_blobs
from modulelens.store.remote.seam import Remote, Version
from modulelens.store.remote.seen import cache_folder
from modulelens.store.upkeep import FsckReport, GcReport

MOST_BYTES = 20_000_000_000


class CachedStore(LocalStore):
    """The entries of a remote.

    Args:
        url: The remote.
        folder: Where entries are kept; by default one per remote, shared by all processes.
        most_bytes: What is kept at most beside the entry in use: `$MODULELENS_CACHE_BYTES`, else
            20 GB. The least recently used entries go first.

    Raises:
        UsageError, EnvironmentLacks, Unavailable: As `open_remote`.
    """

    def __init__(
        self, url: str, *, folder: Path | None = None, most_bytes: int | None = None
    ) -> None:
        self.remote: Remote = open_remote(url)
        super().__init__(folder or cache_folder(self.remote.url))
        limit = os.environ.get("MODULELENS_CACHE_BYTES") or MOST_BYTES
        self._most_bytes = int(limit) if most_bytes is None else most_bytes
        self.writable = False  # notes of measurements would make other versions of these
        self._fetched: dict[str, Fetched] = {}
        self._versions: dict[str, Version] = {}

    # ---- reading

    def metadata(self, entry_id: str) -> Metadata:
        """The record of one entry, fetched without its bytes; raises what `LocalStore` does."""
        if entry_id in self._fetched:
            return self._fetched[entry_id].metadata
        try:
            return self._renamed(super().metadata(entry_id))
        except NotFound:
            fetched = fetch(self.remote, self._version(entry_id))
            self._fetched[entry_id] = fetched
            return fetched.metadata

    def _renamed(self, record: Metadata) -> Metadata:
        """With the tags that it has at the remote, where that was asked."""
        asked = self._versions.get(record.id)
        return msgspec.structs.replace(record, tags=asked.row.tags) if asked else record

    def complete(self, entry_id: str) -> None:
        """Brings all bytes of an entry that are not here yet.

        Raises:
            Unavailable: The remote does not answer.
            Corrupted: What came is not what was put.
            DiskFull: The folder's disk is full.
        """
        if self._is_here(entry_id):
            os.utime(self._layout.entry(entry_id) / "metadata.json")  # used just now
            return
        self.metadata(entry_id)
        fetched = self._fetched[entry_id]
        with self.adding():
            fetch_blobs(self, self.remote, fetched.packs, lambda _: None)
            try:
                new = [(fetched.metadata, fetched.state)]
                super().put_entries(new, keep_versions=True)
            except Conflict:
                if not self._is_here(entry_id):  # else another process was faster
                    raise
        del self._fetched[entry_id]
        self._shrink(entry_id)

    def _is_here(self, entry_id: str) -> bool:
        try:
            super().metadata(entry_id)
        except NotFound:
            return False
        return True

    def resolve(self, ref: str) -> str:
        """As `LocalStore.resolve`, at the remote; by what is here where that does not answer."""
        try:
            (version,) = chosen(self.remote, ref, {})
        except Unavailable as error:
            found = super().resolve(ref)
            warnings.warn(f"{error.message}; {ref} is the newest that is here", stacklevel=2)
            return found
        self._versions[version.row.id] = version
        return version.row.id

    def _version(self, entry_id: str) -> Version:
        if entry_id not in self._versions:
            collection, _, number = entry_id.partition("/")
            if not COLLECTION.fullmatch(collection) or not number.isdecimal():
                raise NotFound(f"{entry_id!r:.100} is no entry id (<collection id>/<version>)")
            self._versions[entry_id] = self.remote.get(collection, number)
        return self._versions[entry_id]

    def find(
        self, filter: Filter | None = None, *, limit: int | None = None, offset: int = 0
    ) -> list[Row]:
        """As `LocalStore.find`, at the remote."""
        if offset < 0 or (limit is not None and limit < 0):
            raise UsageError(f"limit {limit} and offset {offset} cannot be negative")
        rows = self._all(filter or {})
        return rows[offset : None if limit is None else offset + limit]

    def count(self, filter: Filter | None = None) -> int:
        """Number of the entries that a filter selects."""
        return len(self._all(filter or {}))

    def _all(self, filter: Filter) -> list[Row]:
        found = everything(self.remote, filter)
        self._versions |= {version.row.id: version for version in found}
        rows = [version.row for version in found]
        return sorted(rows, key=lambda row: (natural(row.name), row.id, -row.version))

    def versions(self, collection: str) -> list[int]:
        """The versions of a collection (its id), the newest capture first."""
        row = self.remote.get(collection).row
        found = self._all({"model": row.model, "fqn": row.fqn})
        same = [self._versions[row.id] for row in found if row.id.startswith(f"{collection}/")]
        return [v.version for v in sorted(same, key=lambda v: v.age, reverse=True)]

    def aliases(self, collection: str) -> dict[str, int]:
        """The aliases of a collection (its id), alias -> version."""
        row = self.remote.get(collection).row
        found = self._all({"model": row.model, "fqn": row.fqn})
        return {alias: row.version for row in found for alias in row.aliases}

    # ---- changing

    def alias(self, entry_id: str, alias: str) -> None:
        """Moves an alias at the remote."""
        self.remote.alias(self._version(entry_id), add=[alias], remove=())

    def update(self, entry_id: str, change: Callable[[Metadata], Metadata]) -> Metadata:
        """Changes tags at the remote.

        Raises:
            UsageError: More than tags would change.
        """
        old = self.metadata(entry_id)
        new = change(old)
        if msgspec.structs.replace(new, tags=old.tags) != old:
            raise UsageError(
                f"{self.remote.url}: records of a remote do not change",
                hint="pull it into a folder, change it there, push it as a new version",
            )
        add = [tag for tag in new.tags if tag not in old.tags]
        remove = [tag for tag in old.tags if tag not in new.tags]
        self.remote.tag(self._version(entry_id), add=add, remove=remove)
        if entry_id in self._fetched:
            self._fetched[entry_id] = msgspec.structs.replace(self._fetched[entry_id], metadata=new)
        else:
            super().update(entry_id, lambda _: new)
        return new

    def remove(self, entry_id: str, *, force: bool = False) -> None:
        """Deletes an entry at the remote, and here."""
        self.remote.delete(self._version(entry_id), force=force)
        self._fetched.pop(entry_id, None)
        self._versions.pop(entry_id, None)
        if self._is_here(entry_id):
            super().remove(entry_id, force=True)

    def put_entries(self, *_: Any, **__: Any) -> list[Metadata]:
        """Not here.

        Raises:
            UsageError: Always; entries come by a push.
        """
        raise UsageError(
            f"{self.remote.url} is a remote: nothing is added to it directly",
            hint="repo = ml.Repo(); repo.add(trace); repo.push(URL)",
        )

    def fsck(self, *, progress: Callable[[int], None] | None = None) -> FsckReport:
        """Reads every byte that the remote has, and names what is wrong; changes nothing."""
        return examine(self.remote, self._layout.tmp, progress or (lambda _: None))

    def gc(self, *, timeout_s: float = 30.0) -> GcReport:  # noqa: ARG002
        """Not here; raises UsageError."""
        raise UsageError(
            f"{self.remote.url}: bytes that nobody needs any more stay at a remote",
            hint=f"what is kept here of it may be deleted at any time: {self.root}",
        )

    def reindex(self) -> int:
        """Not here; raises UsageError."""
        raise UsageError(
            f"{self.remote.url} is searched where it is, and has no index here",
            hint="`modulelens fsck --repo URL` names what cannot be read",
        )

    def close(self) -> None:
        """Closes the index, and what the remote runs in the background."""
        super().close()
        self.remote.close()

    # ---- size

    def _shrink(self, kept: str) -> None:
        """Removes entries, the least recently used first, until the rest fits."""
        needs: dict[str, dict[str, int]] = {}
        used: dict[str, float] = {}
        for entry_id in self._layout.entry_ids():
            try:
                needs[entry_id] = super().metadata(entry_id).blobs
                used[entry_id] = (self._layout.entry(entry_id) / "metadata.json").stat().st_mtime
            except (ModuleLensError, OSError):
                continue
        sizes = {digest: size for blobs in needs.values() for digest, size in blobs.items()}
        users = Counter(digest for blobs in needs.values() for digest in blobs)
        total, gone = sum(sizes.values()), []
        for entry_id in sorted(used, key=used.__getitem__):
            if total <= self._most_bytes:
                break
            if entry_id != kept:
                gone.append(entry_id)
                users.subtract(needs[entry_id])
                total -= sum(sizes[digest] for digest in needs[entry_id] if not users[digest])
        for entry_id in gone:
            super().remove(entry_id, force=True)
        if gone:
            super().gc()
