"""The care of a whole repo: fsck names what is wrong in it, gc removes what nothing needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from modulelens.errors import Corrupted, ModuleLensError
from modulelens.records import Metadata, ModuleNode, from_json
from modulelens.store.entries import discard, read_entry, read_pointers, unsealed
from modulelens.store.facts import Row, row_of
from modulelens.store.files import Verified, read_regular
from modulelens.store.layout import DIGEST, Layout, is_folder, listing


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong with an entry (its id), a collection (its id) or a blob (its digest).

    `code` is that of the error that using it raises, or NOT_INDEXED (`modulelens reindex` mends
    it), DANGLING_ALIAS. `entries` are the names of those that need a damaged blob.
    """

    subject: str
    code: str
    message: str
    entries: tuple[str, ...] = ()


class FsckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What fsck found; `ok` when that is nothing."""

    problems: tuple[Problem, ...] = ()
    entries: int = 0
    blobs: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check_repo(
    layout: Layout, indexed: Mapping[str, Row], progress: Callable[[int], None] | None = None
) -> FsckReport:
    """Reads all entries and all blobs they need, from the disk, whatever was verified before.

    Args:
        layout: The repo.
        indexed: The rows that search knows, by the entries' ids.
        progress: Called with the number of bytes read since the last call.
    """
    checker = _Checker(layout, progress or (lambda _: None))
    entries = 0
    for collection in layout.collections():
        versions = layout.versions(collection)
        checker.check_aliases(collection, versions)
        for version in versions:
            entries += 1
            checker.check_entry(f"{collection}/{version}", indexed)
    problems = [
        msgspec.structs.replace(problem, entries=tuple(checker.needed.get(problem.subject, ())))
        for problem in checker.problems
    ]
    return FsckReport(problems=tuple(problems), entries=entries, blobs=len(checker.sizes))


class _Checker:
    """Collects problems; each blob is read once, however many entries need it."""

    def __init__(self, layout: Layout, progress: Callable[[int], None]) -> None:
        self.problems: list[Problem] = []
        self.sizes: dict[str, int | None] = {}  # of blobs; None: already reported
        self.needed: dict[str, list[str]] = {}  # reported blob -> names of the entries
        self._layout = layout
        self._progress = progress
        self._verified = Verified()

    def check_aliases(self, collection: str, versions: list[int]) -> None:
        with self._noted(collection):
            for alias, version in read_pointers(self._layout, collection).aliases.items():
                if version not in versions:
                    message = f"alias {alias!r} points at version {version}, which does not exist"
                    self.problems.append(Problem(collection, "DANGLING_ALIAS", message))

    def check_entry(self, entry_id: str, indexed: Mapping[str, Row]) -> None:
        with self._noted(entry_id):
            metadata = read_entry(self._layout, entry_id)
            with self._noted(entry_id):
                path = self._layout.entry(entry_id) / "state.pt"
                self._read(path, metadata.state_digest, f"state.pt of entry {entry_id}")
            for digest, size in metadata.blobs.items():
                with self._noted(entry_id):
                    self._check_blob(digest, size, metadata)
            if self.sizes.get(metadata.node) is not None:
                data = read_regular(self._layout.blob(metadata.node))
                from_json(data, ModuleNode, what=f"the module's node of entry {entry_id}")
            row = indexed.get(entry_id)
            if row is None or msgspec.structs.replace(row, aliases=()) != row_of(metadata):
                message = f"search does not know {metadata.name!r:.200}, or not as it is"
                self.problems.append(Problem(entry_id, "NOT_INDEXED", message))

    def _check_blob(self, digest: str, size: int, metadata: Metadata) -> None:
        if digest not in self.sizes:
            path = self._layout.blob(digest)
            self.sizes[digest] = None
            with self._noted(digest):
                self.sizes[digest] = self._read(path, digest, f"blob {digest}")
        found = self.sizes[digest]
        if found is None:
            self.needed.setdefault(digest, []).append(f"{metadata.name}@v{metadata.version}")
        elif found != size:
            raise Corrupted(f"blob {digest} has {found:,} bytes, the record says {size:,}")

    def _read(self, path: Path, digest: str, what: str) -> int:
        size = self._verified.check(path, digest, what=what).st_size
        self._progress(size)
        return size

    @contextmanager
    def _noted(self, subject: str) -> Iterator[None]:
        try:
            yield
        except ModuleLensError as error:
            self.problems.append(Problem(subject, error.code, error.message))


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """What gc did.

    `removed_leftovers` are files and entry folders that dead writers left. While the entries in
    `unreadable` cannot be read, nobody knows their blobs, and no blob is removed.
    """

    removed_blobs: int = 0
    freed_bytes: int = 0
    removed_leftovers: int = 0
    unreadable: tuple[str, ...] = ()


class _Roots(msgspec.Struct):
    blobs: dict[str, int] = {}


def collect(layout: Layout) -> GcReport:
    """Cleans the repo. The caller keeps all writers out: whatever is unfinished is dead."""
    needed: set[str] = set()
    unreadable, leftovers, freed = [], 0, 0
    for entry_id in layout.entry_ids():
        folder = layout.entries / entry_id
        path = folder / "metadata.json"
        if not path.exists() and not path.is_symlink():
            freed += discard(folder)
            leftovers += 1
            continue
        try:
            data = unsealed(read_regular(path), what=str(path))
            needed.update(from_json(data, _Roots, what=str(path)).blobs)
        except ModuleLensError:
            unreadable.append(entry_id)
    drafts = listing(layout.tmp)
    shards = [path for path in listing(layout.blobs) if is_folder(path)]
    blobs = [path for shard in shards for path in shard.iterdir() if DIGEST.fullmatch(path.name)]
    unneeded = [] if unreadable else [path for path in blobs if path.name not in needed]
    for path in (*drafts, *unneeded):
        freed += discard(path)
    return GcReport(
        removed_blobs=len(unneeded),
        freed_bytes=freed,
        removed_leftovers=leftovers + len(drafts),
        unreadable=tuple(unreadable),
    )
