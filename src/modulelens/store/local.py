"""The local store: one repo in a folder, safe for several processes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from modulelens.errors import NotARepo, NotFound, UsageError
from modulelens.records import Metadata
from modulelens.store import blobs, entries
from modulelens.store.facts import Row
from modulelens.store.files import Verified, read_regular
from modulelens.store.layout import open_layout
from modulelens.store.locks import Adds, Changed, locked, settle, writing
from modulelens.store.query import Filter
from modulelens.store.upkeep import FsckReport, GcReport, check_repo, collect

if TYPE_CHECKING:
    import torch

    from modulelens.store.index import Index


class LocalStore:
    """Blobs and entries in one folder, and the index over them.

    Safe for several threads and processes. A reader sees a whole entry or none; kill -9 costs at
    most the entry being written. `root` is created when missing or empty, if `create` is true; it
    stays where it is when the process changes its folder.

    Raises:
        NotARepo: `root` is a file, or a folder that holds something else or cannot be had.
        NotFound: No repo there, and `create` is False.
        SchemaTooNew: A newer ModuleLens made it.
    """

    def __init__(self, root: Path, *, create: bool = True) -> None:
        try:
            self._layout = open_layout(Path(root).expanduser().absolute(), create=create)
        except (OSError, ValueError, RuntimeError) as error:  # the last: nobody has such a home
            hint = "give a folder that you may read and write"
            raise NotARepo(f"{root} cannot be opened or made: {error}", hint=hint) from error
        self._verified = Verified()
        self._adds = Adds(self._layout.gc_lock)
        self.root = self._layout.root
        self.writable = self._layout.writable
        self.outbox_path = self._layout.outbox

    # Blobs

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Keeps every gc away from the blobs that are put in the block.

        Without it, the gc of other processes is kept away as well, from the first put until all
        blobs put have an entry; but a `gc` of this store gives up the blobs that still have none.
        """
        self._layout.check_writable()
        self._index.open()
        with self._adds.hold():
            try:
                yield
            finally:
                self._adds.give_up()

    def put_blobs(
        self,
        buffers: Sequence[memoryview | bytes],
        *,
        progress: Callable[[int], None] | None = None,
        wait: bool = True,
    ) -> list[str]:
        """Stores C-contiguous buffers and returns their digests, in their order.

        Equal buffers are written once, those that exist are not. `progress` is called with the
        size of each buffer once it is stored. Without `wait`, inside `adding`, the buffers have to
        stay until the next entry is put or the block ends: only then are all written.

        Raises:
            DiskFull: No space is left.
        """
        self._layout.check_writable()
        with self._adds.hold():
            digests, finish = blobs.put_blobs(self._layout, buffers, progress)
            sizes = (memoryview(buffer).nbytes for buffer in buffers)
            self._adds.promise(dict(zip(digests, sizes, strict=True)), finish)
            if wait:
                self._adds.finish()
        return digests

    def blob_path(self, digest: str, *, verify: bool = True) -> Path:
        """Path of a blob; its bytes are verified once per process and state of the file.

        Raises:
            NotFound: No such blob.
            Corrupted: The bytes differ from the digest.
        """
        path = self._layout.blob(digest)
        if not path.exists():
            hint = "`modulelens fsck` names the entries"
            raise NotFound(f"no blob {digest} in {self.root}", hint=hint)
        if verify:
            self._verified.check(path, digest, what=f"blob {digest[:16]}...")
        return path

    def complete(self, entry_id: str) -> None:
        """Makes sure that all bytes of an entry are here; those of a local repo are."""

    def blob_bytes(self, digest: str) -> bytes:
        """The bytes of a blob, verified; raises what `blob_path` does."""
        return read_regular(self.blob_path(digest))

    # Entries

    def put_entries(
        self,
        new: Sequence[tuple[Metadata, Mapping[str, torch.Tensor] | bytes]],
        *,
        aliases: Sequence[str] = (),
        keep_versions: bool = False,
        progress: Callable[[Metadata], None] | None = None,
    ) -> list[Metadata]:
        """Stores entries, each as the next free version of its collection; returns the records.

        Each is there on its own: after an error all before it stay.

        Args:
            new: Records, whose `version`, `state_digest` and, where empty, `created` are set here,
                and the plain tensors that each entry owns, or its state.pt.
            aliases: Moved to the new versions.
            keep_versions: The records have their versions.
            progress: Called with each record as stored.

        Raises:
            Conflict: A blob in a record's `blobs` is not there, or has another size; or the
                version that a record has is taken.
            DiskFull: No space is left; nothing of the entry stays.
            UsageError: A value of a state is not a plain tensor, or an alias cannot be used.
        """
        from modulelens.store.state import dump_state

        for alias in aliases:
            entries.check_alias(alias)
        self._adds.finish()
        stored = []
        with self._change(*(metadata.collection for metadata, _ in new)) as changed:
            for record, state in new:
                data = state if isinstance(state, bytes) else dump_state(state)
                entries.check_blobs(self._layout, record, self._adds.present)
                number = record.version if keep_versions else None
                metadata = entries.commit_entry(self._layout, record, data, number)
                changed.records[metadata.id] = metadata
                changed.versions[metadata.collection].add(metadata.version)
                self._adds.settle(metadata.blobs)
                changed.versions[metadata.collection] |= entries.point(
                    self._layout, metadata.collection, aliases, metadata.version
                )
                stored.append(metadata)
                if progress:
                    progress(metadata)
        return stored

    def metadata(self, entry_id: str) -> Metadata:
        """The record of one entry.

        Raises:
            NotFound: No such entry.
            Corrupted: Its metadata.json cannot be read.
            SchemaTooNew: A newer ModuleLens wrote it.
        """
        return entries.read_entry(self._layout, entry_id)

    def state(self, entry_id: str, keys: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of an entry's state.pt, verified and mapped from the file.

        Raises:
            NotFound: No such entry, or a key is not there.
            Corrupted: state.pt differs from its digest, or is no flat {key: tensor}.
        """
        from modulelens.store.state import load_state

        return load_state(self.state_path(self.metadata(entry_id)), entry_id, keys)

    def state_path(self, metadata: Metadata) -> Path:
        """Path of an entry's state.pt, verified.

        Raises:
            Corrupted: It differs from its digest.
        """
        path = self._layout.entry(metadata.id) / "state.pt"
        self._verified.check(path, metadata.state_digest, what=f"state.pt of entry {metadata.id}")
        return path

    def update(self, entry_id: str, change: Callable[[Metadata], Metadata]) -> Metadata:
        """Rewrites a record as `change` makes it of the current one: one step for all processes.

        Raises:
            NotFound: No such entry.
            DiskFull: No space is left; the old record stays.
        """
        collection, version = self._layout.existing(entry_id)
        with self._change(collection) as changed:
            metadata = change(self.metadata(entry_id))
            entries.rewrite_entry(self._layout, metadata)
            changed.records[metadata.id] = metadata
            changed.versions[collection].add(version)
        return metadata

    def remove(self, entry_id: str, *, force: bool = False) -> None:
        """Removes an entry, also one that cannot be read; its blobs go with the next gc.

        Raises:
            NotFound: No such entry.
            Conflict: An alias points at it, and `force` is False.
        """
        collection, version = self._layout.existing(entry_id)
        with self._change(collection) as changed:
            changed.versions[collection].add(version)
            entries.remove_entry(self._layout, entry_id, force=force)

    # Names

    def alias(self, entry_id: str, alias: str) -> None:
        """Lets an alias point at this version of the collection, and no longer at another.

        Raises:
            NotFound: No such entry.
            UsageError: The alias is empty, like a version, or has an "@".
        """
        entries.check_alias(alias)
        collection, version = self._layout.existing(entry_id)
        with self._change(collection) as changed:
            changed.versions[collection] = entries.point(self._layout, collection, [alias], version)

    def aliases(self, collection: str) -> dict[str, int]:
        """The aliases of a collection (its id), alias -> version."""
        return dict(entries.read_pointers(self._layout, collection).aliases)

    def resolve(self, ref: str) -> str:
        """The id of an entry: of `model/fqn`, `model/fqn@v2`, `model/fqn@alias`, `model`, an id.

        Raises:
            NotFound: Nothing fits; `did_you_mean` has the closest names.
        """
        from modulelens.store.resolve import resolve

        return resolve(self._layout, ref, lambda text: self._fresh_index().names(text))

    def versions(self, collection: str) -> list[int]:
        """The versions of a collection (its id), the newest first."""
        return self._layout.versions(collection)

    # Search

    def find(
        self,
        filter: Filter | None = None,
        *,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Row]:
        """Rows of the entries that a filter selects, by name (layers.2 before layers.10).

        The filter language is in `modulelens.store.query`.

        Raises:
            UsageError: The filter, `limit` or `offset` cannot be used.
        """
        if offset < 0 or (limit is not None and limit < 0):
            raise UsageError(f"limit {limit} and offset {offset} cannot be negative")
        return self._fresh_index().find(filter or {}, limit=limit, offset=offset)

    def count(self, filter: Filter | None = None) -> int:
        """Number of the entries that a filter selects."""
        return self._fresh_index().count(filter or {})

    # Upkeep

    def gc(self, *, timeout_s: float = 30.0) -> GcReport:
        """Removes blobs that no entry needs, and what dead writers left.

        Raises:
            Conflict: An add was in progress somewhere for all of `timeout_s` seconds.
        """
        self._layout.check_writable()
        self._adds.give_up()
        with locked(self._layout.gc_lock, timeout_s=timeout_s):
            report = collect(self._layout)
        self._fresh_index()
        return report

    def fsck(self, *, progress: Callable[[int], None] | None = None) -> FsckReport:
        """Reads every byte that an entry needs, and names what is wrong; changes nothing."""
        return check_repo(self._layout, {row.id: row for row in self.find()}, progress)

    def reindex(self) -> int:
        """Builds the index anew from the entries; returns their number."""
        self._layout.check_writable()
        return self._index.rebuild()

    def close(self) -> None:
        """Closes the index; the next search opens it again."""
        if "_index" in self.__dict__:
            self._index.close()

    @cached_property
    def _index(self) -> Index:
        # Imported late: opening, resolving and reading one entry need no sqlite3.
        from modulelens.store.index import Index

        return Index(self._layout, partial(entries.read_rows, self._layout), writable=self.writable)

    def _fresh_index(self) -> Index:
        settle(self._layout, self._index.refresh, writable=self.writable)
        return self._index

    @contextmanager
    def _change(self, *collections: str) -> Iterator[Changed]:
        self._layout.check_writable()
        with self._adds.hold(), writing(self._layout, collections) as changed:
            yield changed
            read = partial(entries.read_rows, self._layout, known=changed.records)
            changed.indexed = self._index.refresh(changed.versions, read)
