"""Checks every byte of a repo and names what is wrong. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from modulelens.errors import Corrupted, ModuleLensError
from modulelens.records import Metadata, ModuleNode, from_json
from modulelens.store.aliases import read_pointers
from modulelens.store.entries import read_entry
from modulelens.store.files import Verified, read_regular
from modulelens.store.layout import Layout


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong with an entry (its id), a collection (its id) or a blob (its digest).

    `code` is that of the error that using it raises, or NOT_INDEXED, DANGLING_ALIAS.
    """

    subject: str
    code: str
    message: str


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
    layout: Layout, indexed: set[str], progress: Callable[[int], None] | None = None
) -> FsckReport:
    """Reads all entries and all blobs they need, from the disk, whatever was verified before.

    Args:
        layout: The repo.
        indexed: Ids of the entries that search knows.
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
    return FsckReport(
        problems=tuple(checker.problems), entries=entries, blobs=len(checker.blob_sizes)
    )


class _Checker:
    """Collects problems; each blob is read once, however many entries need it."""

    def __init__(self, layout: Layout, progress: Callable[[int], None]) -> None:
        self.problems: list[Problem] = []
        self.blob_sizes: dict[str, int | None] = {}  # None: already reported
        self._layout = layout
        self._progress = progress
        self._verified = Verified()

    def check_aliases(self, collection: str, versions: list[int]) -> None:
        try:
            pointers = read_pointers(self._layout, collection)
        except ModuleLensError as error:
            return self._report(collection, error)
        for alias, version in pointers.aliases.items():
            if version not in versions:
                message = f"alias {alias!r} points at version {version}, which does not exist"
                self.problems.append(Problem(collection, "DANGLING_ALIAS", message))

    def check_entry(self, entry_id: str, indexed: set[str]) -> None:
        try:
            metadata = read_entry(self._layout, entry_id)
        except ModuleLensError as error:
            return self._report(entry_id, error)
        path = self._layout.entry(entry_id) / "state.pt"
        self._check_file(path, metadata.state_digest, f"state.pt of entry {entry_id}", entry_id)
        for digest, size in metadata.blobs.items():
            self._check_blob(digest, size, metadata)
        if metadata.node and self.blob_sizes.get(metadata.node) is not None:
            try:
                data = read_regular(self._layout.blob(metadata.node))
                from_json(data, ModuleNode, what=f"the module's node of entry {entry_id}")
            except ModuleLensError as error:
                self._report(entry_id, error)
        if entry_id not in indexed:
            message = f"search does not know {metadata.name!r:.200}; run `modulelens reindex`"
            self.problems.append(Problem(entry_id, "NOT_INDEXED", message))

    def _check_blob(self, digest: str, size: int, metadata: Metadata) -> None:
        if digest not in self.blob_sizes:
            path = self._path(digest, metadata)
            self.blob_sizes[digest] = (
                self._check_file(path, digest, f"blob {digest}", digest) if path else None
            )
        found = self.blob_sizes[digest]
        if found is not None and found != size:
            message = f"blob {digest} has {found:,} bytes, entry {metadata.id} says {size:,}"
            self._report(metadata.id, Corrupted(message))

    def _path(self, digest: str, metadata: Metadata) -> Path | None:
        try:
            return self._layout.blob(digest)
        except ModuleLensError as error:
            self._report(metadata.id, error)
            return None

    def _check_file(self, path: Path, digest: str, what: str, subject: str) -> int | None:
        try:
            size = self._verified.check(path, digest, what=what).st_size
        except ModuleLensError as error:
            self._report(subject, error)
            return None
        self._progress(size)
        return size

    def _report(self, subject: str, error: ModuleLensError) -> None:
        self.problems.append(Problem(subject, error.code, error.message))
