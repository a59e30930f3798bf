"""A repo of entries: the door that joins capture, store, rebuild and measure.

Opening, searching and reading need no torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modulelens.entry import Entry
from modulelens.errors import DiskFull, ModuleLensError, UsageError
from modulelens.records import GradeLevel, Metadata
from modulelens.sharing import Shared
from modulelens.store import FsckReport, GcReport, LocalStore, Row

if TYPE_CHECKING:
    from modulelens.capture import Trace

Progress = Callable[[int, int], None]


class Repo(Shared):
    """Entries on disk, or of a remote.

    Args:
        path: A folder, made when it is missing; a relative one is that of this moment. Or a
            remote's URL (`wandb://entity/registry`, `s3://bucket/folder`, `file:///mnt/team`):
            found there, fetched when used. None: `$MODULELENS_REPO`, else `./.modulelens`.
        allow: Top-level packages whose classes entries may name besides their own.

    Raises:
        NotARepo: The path is a file, or a folder that holds something else.
        SchemaTooNew: A newer ModuleLens made it.
        UsageError: The path is none, or a URL of a kind that is not supported.
        Unavailable: The remote does not answer.

    Example:
        >>> repo = ml.Repo()
        >>> entries = repo.add(trace)
        >>> repo["dlrm/over_arch"].check()
    """

    def __init__(self, path: str | Path | None = None, *, allow: Iterable[str] = ()) -> None:
        place = path if path is not None else os.environ.get("MODULELENS_REPO") or ".modulelens"
        self._store = _opened(place)
        self._allow = tuple(allow)

    def __repr__(self) -> str:
        return f"Repo({str(self.root)!r})"

    @property
    def root(self) -> Path:
        """The repo's folder."""
        return self._store.root

    # ---- adding

    def add(
        self,
        trace: Trace,
        verify: bool = True,
        tags: Sequence[str] = (),
        aliases: Sequence[str] = (),
        *,
        progress: Progress | None = None,
    ) -> list[Entry]:
        """Stores every capture of a trace; with `verify`, replays each and grades it.

        Args:
            trace: A finished trace.
            verify: Rebuild and run every entry in a warm worker process.
            tags: Put on every entry.
            aliases: Moved to the new version of every collection.
            progress: Gets `(done, total)` entries.

        Returns:
            The entries in the order of `trace.captures`.

        Raises:
            NotFound: The trace holds nothing.
            UsageError: `tags` or `aliases` is one text, or holds an empty one.
            DiskFull: No space is left; entries stored so far stay, no half entry does.
        """
        from modulelens.capture import Trace as TraceClass
        from modulelens.ingest import Ingest

        if not isinstance(trace, TraceClass):
            raise UsageError(
                f"repo.add got a {type(trace).__name__}, not a Trace",
                hint="pass what ml.trace gave",
            )
        _check_words("tags", tags)
        _check_words("aliases", aliases)
        report = progress or (lambda _done, _total: None)
        ingest = Ingest(trace, self._store)
        total = len(trace.captures) * (2 if verify else 1)
        entries: list[Entry] = []
        with self._store.adding():
            ingest.run()
            new = [
                (msgspec.structs.replace(metadata, tags=tuple(tags)), state)
                for metadata, state in ingest.entries()
            ]

            def note(stored: Metadata) -> None:
                entries.append(Entry(self._store, stored, self._allow))
                report(len(entries), total)

            try:
                self._store.put_entries(new, aliases=aliases, progress=note)
            except DiskFull as error:
                lost = ", ".join(metadata.name for metadata, _ in new[len(entries) :][:5])
                missing = f"{len(new) - len(entries)} of {len(new)} entries not stored: {lost}"
                raise DiskFull(f"{error.message}; {missing}", hint=error.hint) from error
        if verify:
            self.verify(entries, progress=lambda done, _: report(len(entries) + done, total))
        if entries[0].metadata.environment.world_size > 1:
            _merge_all(self, entries, verify=verify)
        return entries

    def merge(self, entry: Entry | str, *, verify: bool = True) -> Entry:
        """A new version: the whole module, of the parts that the ranks of its job stored.

        Raises:
            UsageError: It does not lie in parts, or the repo is a remote.
            NotFound: The entry of a rank is missing.
            NotRebuildable: Parts lie in a way that cannot be put together.
        """
        from modulelens.merge import merge, siblings

        self._check_keeps("entries", "pull the parts into a repo of your own, merge there")
        found = self._as_entry(entry)
        if not (ranks := found._replay().parts):
            raise UsageError(f"{found.name}@v{found.version} is whole: there is nothing to merge")
        same = siblings(found.metadata, self._collection(found.metadata), ranks)
        with self._store.adding():
            (stored,) = self._store.put_entries([merge(self._store, same)])
        made = self._entry(stored.id)
        if verify:
            self.verify([made])
        return made

    def _collection(self, metadata: Metadata) -> list[Metadata]:
        return [e.metadata for e in self.find({"model": metadata.model, "fqn": metadata.fqn})]

    def verify(self, entries: Sequence[Entry], *, progress: Progress | None = None) -> None:
        """Replays entries in a warm worker process and stores their grades.

        Raises:
            UsageError: Nothing can be stored here, as in a remote.
        """
        self._check_keeps("grades", "entry.check() judges without; or pull into a repo of your own")
        from modulelens.grading import grade_all

        grade_all(entries, progress)
        bad = [e for e in entries if e.grade is not None and e.grade.level is GradeLevel.NO]
        if bad:
            first = bad[0]
            assert first.grade is not None
            text = f"{len(bad)} of {len(entries)} entries cannot be rebuilt exactly, such as "
            warnings.warn(f"{text}{first.name}: {first.grade.reason}", stacklevel=3)

    # ---- finding

    def __getitem__(self, ref: str) -> Entry:
        """The entry of `model/fqn`, `model/fqn@v2`, `model/fqn@alias`, `model`, or an id.

        Raises:
            NotFound: Nothing fits; the error says what is close.
            UsageError: It is no text.
        """
        return self._entry(self._store.resolve(ref))

    def __contains__(self, ref: str) -> bool:
        from modulelens.errors import NotFound

        try:
            self._store.resolve(ref)
        except NotFound:
            return False
        return True

    def __len__(self) -> int:
        return self._store.count()

    def __iter__(self) -> Iterator[Entry]:
        return (self._entry(row.id) for row in self._store.find())

    def find(
        self, filter: Mapping[str, Any] | None = None, *, limit: int | None = None, offset: int = 0
    ) -> list[Entry]:
        """The entries that a filter selects; an entry that cannot be read is left to `fsck`.

        Args:
            filter: Mongo-style, such as `{"cls": "MLP", "params": {"$gt": 1e6}}`; None: all.
            limit: Most entries to return.
            offset: Entries to leave out at the start.

        Raises:
            UsageError: The filter cannot be used; the error says what is close.
        """
        found = []
        for row in self._store.find(dict(filter) if filter else None, limit=limit, offset=offset):
            try:
                found.append(self._entry(row.id))
            except ModuleLensError as error:
                warnings.warn(f"entry {row.id} left out: {error.message}", stacklevel=2)
        return found

    def rows(
        self, filter: Mapping[str, Any] | None = None, *, limit: int | None = None, offset: int = 0
    ) -> list[Row]:
        """As `find`, the searchable facts only: nothing but the index is read."""
        return self._store.find(dict(filter) if filter else None, limit=limit, offset=offset)

    def count(self, filter: Mapping[str, Any] | None = None) -> int:
        """Number of entries that a filter selects."""
        return self._store.count(dict(filter) if filter else None)

    def versions(self, ref: str) -> list[Entry]:
        """All versions of the collection that `ref` names, newest first."""
        collection = self._store.resolve(ref).partition("/")[0]
        return [self._entry(f"{collection}/{v}") for v in self._store.versions(collection)]

    # ---- changing

    def tag(self, entry: Entry | str, *tags: str) -> Entry:
        """Adds tags to an entry.

        Raises:
            UsageError: A tag is empty.
        """
        _check_words("tags", tags)
        found = self._as_entry(entry)
        found._change(lambda m: {"tags": tuple(dict.fromkeys((*m.tags, *tags)))})
        return found

    def alias(self, entry: Entry | str, alias: str) -> None:
        """Lets an alias of the entry's collection point at it, and no longer at another version.

        Raises:
            UsageError: The alias is none.
        """
        _check_words("alias", [alias])
        self._store.alias(self._as_entry(entry).id, alias)

    def aliases(self, entry: Entry | str) -> dict[str, int]:
        """The aliases of the entry's collection, alias -> version."""
        return self._store.aliases(self._as_entry(entry).metadata.collection)

    def remove(self, entry: Entry | str, *, force: bool = False) -> str:
        """Removes an entry and returns its id; `gc` then frees what nobody else needs.

        Raises:
            Conflict: An alias points at it, and `force` is not given.
        """
        found = entry.id if isinstance(entry, Entry) else self._store.resolve(entry)
        self._store.remove(found, force=force)
        return found

    def gc(self) -> GcReport:
        """Removes bytes that no entry needs, and leftovers of dead writers.

        Raises:
            UsageError: The repo is a remote.
        """
        return self._store.gc()

    def fsck(self, progress: Callable[[int], None] | None = None) -> FsckReport:
        """Reads every byte that any entry needs and names what is wrong; changes nothing."""
        return self._store.fsck(progress=progress)

    def reindex(self) -> int:
        """Builds the search index anew; returns its number of entries, warns of those left out.

        Raises:
            UsageError: The repo is a remote.
        """
        return self._store.reindex()

    def _check_keeps(self, what: str, hint: str) -> None:
        if not self._store.writable:
            raise UsageError(f"{self!r} keeps no new {what}", hint=hint)

    def _as_entry(self, entry: Entry | str) -> Entry:
        return entry if isinstance(entry, Entry) else self[entry]

    def _entry(self, entry_id: str) -> Entry:
        return Entry(self._store, self._store.metadata(entry_id), self._allow)


def _opened(place: object) -> LocalStore:
    if not isinstance(place, (str, os.PathLike)):
        raise UsageError(f"Repo({place!r}): a repo is a folder", hint="give its path as text")
    if "://" not in str(place):
        return LocalStore(Path(place))
    from modulelens.store.remote.cached import CachedStore

    return CachedStore(str(place))


def _merge_all(repo: Repo, entries: Sequence[Entry], *, verify: bool) -> None:
    """Merges those whose last part has come with them; a failure is a warning."""
    from modulelens.merge import is_last, merged_before

    made = []
    for entry in entries:
        mine = entry.metadata
        if is_last(mine, entry._replay().parts, repo._collection(mine)):
            try:
                merged = repo.merge(entry, verify=False)
                if merged_before(merged.metadata, repo._collection(mine)):
                    repo.remove(merged)  # another rank was faster
                else:
                    made.append(merged)
            except ModuleLensError as error:
                warnings.warn(f"the parts of {entry.name} stay apart: {error}", stacklevel=3)
    if verify and made:
        repo.verify(made)


def _check_words(name: str, words: Sequence[str]) -> None:
    if isinstance(words, str):
        raise UsageError(f"{name}={words!r} is one text", hint=f"write {name}=[{words!r}]")
    wrong = [word for word in words if not isinstance(word, str) or not word.strip()]
    if wrong:
        raise UsageError(f"{name}: {wrong[0]!r} is no name", hint="use a text that is not empty")
