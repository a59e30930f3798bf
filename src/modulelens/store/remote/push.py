"""The outbox -> a remote: entries of a capture together, what they share once.

One worker per repo; a second one waits for nothing and says so. What a killed worker left is
found by the next one: packs and entries that arrived are known at the remote and not sent again.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from modulelens.errors import ModuleLensError, NotFound, RepoError, Unavailable, UsageError
from modulelens.records import Metadata, to_json
from modulelens.store.facts import row_of
from modulelens.store.files import digest_of
from modulelens.store.local import LocalStore
from modulelens.store.locks import locked
from modulelens.store.remote import open_remote, packs
from modulelens.store.remote.outbox import SENT, WAITING, Outbox, Parcel
from modulelens.store.remote.seam import Draft, Pack, Remote, Version
from modulelens.store.remote.spread import spread

#: Most bytes that lie in the spool at a time, twice on the disk where links cannot be had.
BUNDLE_BYTES = 1 << 30
_FIRST_S, _MOST_S = 1.0, 60.0
_SPOOL = "modulelens-spool-"


class Pushed(msgspec.Struct, kw_only=True):
    """What a push did: entries that are new at the remote, that were there, that wait or failed."""

    sent: int = 0
    known: int = 0
    waiting: int = 0
    failed: tuple[str, ...] = ()
    bytes: int = 0


class Progress(msgspec.Struct, frozen=True):
    """How far a push is; `waits_s` and `why` while it waits for the remote."""

    done: int
    total: int
    bytes: int = 0
    waits_s: float = 0.0
    why: str = ""


Report = Callable[[Progress], None]


class _Leaving(msgspec.Struct, frozen=True):
    """An entry that is being sent: the bytes of its record, and their digest."""

    parcel: Parcel
    metadata: Metadata
    identity: str
    record: bytes


class Pusher:
    """Drains the outbox of a repo to one remote.

    Args:
        store: The repo.
        remote: Where to.
        url: What the outbox calls it.
        tries: How often an entry is tried while the remote is unavailable; 0: without end.
        threads: Entries that are put at the same time.
        report: Told how far it is.
    """

    def __init__(
        self,
        store: LocalStore,
        remote: Remote,
        url: str,
        *,
        tries: int = 5,
        threads: int = 16,
        report: Report | None = None,
    ) -> None:
        self._store = store
        self._remote = remote
        self._url = url
        self._tries = tries or math.inf
        self._threads = threads
        self._report = report or (lambda _: None)
        self.outbox = Outbox(store.outbox_path)
        self.done = Pushed()
        self._total = 0
        self._counting = threading.RLock()

    def drain(self, wait_s: float = 0.0) -> Pushed:
        """Sends what is in the outbox, until nothing waits or the tries are used up.

        Raises:
            Conflict: Another process drains this repo's outbox, for all of `wait_s` seconds.
            PermissionDenied, DiskFull: The remote does not let us, or is full; what waits stays in
                the outbox.
        """
        with locked(self._store.outbox_path.with_suffix(".lock"), timeout_s=wait_s):
            sweep()
            while parcels := self.outbox.next(self._url):
                self._total = self._count() + self.outbox.waiting(self._url)
                if (pause := min(parcel.due for parcel in parcels) - time.time()) > 0:
                    self._tell(pause, parcels[0].error)
                    time.sleep(min(pause, 1.0))
                elif not self._capture(parcels):
                    break
        self.done.waiting = self.outbox.waiting(self._url)
        return self.done

    def _capture(self, parcels: list[Parcel]) -> bool:
        """Sends entries of one capture; False: the remote cannot be had, and we give up."""
        try:
            entries = list(self._read(parcels))
            known = self._remote.known({e.identity: e.metadata.collection for e in entries})
            new = [entry.metadata for entry in entries if entry.identity not in known]
            places = self._packs(new, parcels[0].capture)
            modules: dict[str, list[_Leaving]] = {}
            for entry in sorted(entries, key=lambda entry: entry.metadata.version):
                modules.setdefault(entry.metadata.collection, []).append(entry)

            def send(versions: list[_Leaving]) -> None:
                for entry in versions:
                    self._send(entry, known.get(entry.identity), places)

            spread(send, modules.values(), self._threads)
        except Unavailable as error:
            return self._later(parcels, error)
        return True

    def _read(self, parcels: list[Parcel]) -> Iterator[_Leaving]:
        for parcel in parcels:
            try:
                metadata = self._store.metadata(parcel.entry)
            except ModuleLensError as error:
                gone = isinstance(error, NotFound)
                self._fail(parcel, "it was removed here" if gone else error.message)
                continue
            record = record_of(metadata)
            yield _Leaving(parcel, metadata, digest_of(record), record)

    def _packs(self, new: list[Metadata], capture: str) -> dict[str, Pack | ModuleLensError]:
        """Puts the packs of entries; gives each blob's pack, or what is wrong here with it."""
        by_blob: dict[str, Pack | ModuleLensError] = {}
        needed = {digest for record in new for digest in record.blobs}
        # Of the whole capture, so that a push that goes on makes the packs that are there already.
        groups = packs.plan(list(self._whole(capture))) if needed else []
        for bundle in packs.bundles(groups, BUNDLE_BYTES):
            if all(needed.isdisjoint(group) for group in bundle):
                continue
            with spool() as folder:
                files: dict[Path, Pack] = {}
                for group in bundle:
                    try:
                        path, pack = packs.write(group, self._store.blob_path, folder)
                    except (NotFound, RepoError) as error:
                        by_blob |= dict.fromkeys(group, error)
                    else:
                        files[path] = pack
                label = new[0].model
                for pack in self._remote.put_packs(files, label=label, progress=self._note):
                    by_blob |= dict.fromkeys(pack.blobs, pack)
        return by_blob

    def _whole(self, capture: str) -> Iterator[Metadata]:
        for parcel in self.outbox.all(self._url, (WAITING, SENT), capture):
            with suppress(ModuleLensError):  # one that cannot be read is not sent
                yield self._store.metadata(parcel.entry)

    def _send(
        self,
        entry: _Leaving,
        known: Version | None,
        places: Mapping[str, Pack | ModuleLensError],
    ) -> None:
        metadata = entry.metadata
        try:
            aliases = self._store.aliases(metadata.collection).items()
            mine = [alias for alias, version in aliases if version == metadata.version]
            if known is not None:
                self._rename(known, set(metadata.tags), set(mine))
                self.outbox.sent(entry.parcel, entry.identity, known.version)
                self._note(known=1)
                return
            needed: dict[str, Pack] = {}
            for digest in metadata.blobs:
                pack = places[digest]
                if isinstance(pack, ModuleLensError):
                    raise pack
                needed[pack.name] = pack
            state = self._store.state_path(metadata)
            draft = Draft(
                identity=entry.identity,
                row=row_of(metadata, mine),
                record=entry.record,
                state=state,
                packs=tuple(needed.values()),
                run=metadata.environment.run,
            )
            version = self._remote.put(draft).version
        except (NotFound, RepoError, UsageError) as error:
            # It is damaged here, or has a name that the remote cannot have: the others go on.
            self._fail(entry.parcel, error.message)
            return
        self.outbox.sent(entry.parcel, entry.identity, version)
        self._note(len(entry.record) + state.stat().st_size, sent=1)

    def _rename(self, there: Version, tags: set[str], aliases: set[str]) -> None:
        if new := sorted(tags.difference(there.row.tags)):
            self._remote.tag(there, add=new, remove=())
        if new := sorted(aliases.difference(there.row.aliases)):
            self._remote.alias(there, add=new, remove=())

    def _later(self, parcels: list[Parcel], error: Unavailable) -> bool:
        waiting = {p.entry for p in self.outbox.all(self._url, (WAITING,), parcels[0].capture)}
        rest = [parcel for parcel in parcels if parcel.entry in waiting]
        tries = 1 + max((parcel.tries for parcel in rest), default=0)
        pause = error.after_s or min(_FIRST_S * 2 ** (tries - 1), _MOST_S) * random.uniform(0.5, 1)
        for parcel in rest:
            self.outbox.later(parcel, error.message, pause)
        return tries < self._tries

    def _fail(self, parcel: Parcel, why: str) -> None:
        self.outbox.failed(parcel, why)
        with self._counting:
            self.done.failed += (f"{parcel.entry}: {why}",)

    def _count(self) -> int:
        return self.done.sent + self.done.known + len(self.done.failed)

    def _note(self, nbytes: int = 0, *, sent: int = 0, known: int = 0) -> None:
        with self._counting:
            self.done.bytes += nbytes
            self.done.sent += sent
            self.done.known += known
            self._tell()

    def _tell(self, waits_s: float = 0.0, why: str = "") -> None:
        self._report(Progress(self._count(), self._total, self.done.bytes, waits_s, why))


def send(
    store: LocalStore,
    url: str,
    records: Sequence[Metadata] = (),
    *,
    tries: int = 5,
    wait_s: float = 0.0,
    report: Report | None = None,
) -> Pushed:
    """Puts entries into the outbox and sends all that is in it; raises what `drain` does."""
    Outbox(store.outbox_path).ask(url, records)
    remote = open_remote(url)
    try:
        return Pusher(store, remote, url, tries=tries, report=report).drain(wait_s)
    finally:
        remote.close()


def record_of(metadata: Metadata) -> bytes:
    """The bytes whose digest is the entry's identity: all but what a remote gives anew."""
    return to_json(msgspec.structs.replace(metadata, version=0, tags=()))


@contextmanager
def spool(parent: Path | None = None) -> Iterator[Path]:
    """A folder for files on their way; without a parent, its path says nothing of the user's."""
    folder = Path(tempfile.mkdtemp(prefix=_SPOOL, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(older_s: float = 86_400.0) -> None:
    """Removes what killed workers left in the spool a day ago or earlier."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SPOOL}*"):
        try:
            if time.time() - folder.lstat().st_mtime > older_s and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue
