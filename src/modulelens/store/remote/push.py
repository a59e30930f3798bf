"""The outbox -> a remote: entries of a capture together, what they share once.

One worker per repo and remote; a second one waits for nothing and says so. What a killed worker
left is found by the next one: packs and entries that arrived are known at the remote and not sent
again. What others changed there since (moved aliases, removed tags and entries) stays as it is.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path

import msgspec

from modulelens.errors import (
    Conflict,
    ModuleLensError,
    NotFound,
    RepoError,
    Unavailable,
    UsageError,
)
from modulelens.records import Metadata, to_json
from modulelens.store.facts import row_of
from modulelens.store.files import digest_of
from modulelens.store.local import LocalStore
from modulelens.store.locks import locked
from modulelens.store.remote import checked, open_remote, packs
from modulelens.store.remote.names import Names, dump, load, names_of, texts
from modulelens.store.remote.outbox import SENT, WAITING, Outbox, Parcel
from modulelens.store.remote.seam import Draft, Pack, Remote, Version
from modulelens.store.remote.spool import spool, sweep
from modulelens.store.remote.spread import spread

#: Most bytes that lie in the spool at a time, twice on the disk where links cannot be had.
BUNDLE_BYTES = 1 << 30
_FIRST_S, _MOST_S = 1.0, 60.0
_TURN_S = 60.0


class Pushed(msgspec.Struct, kw_only=True):
    """What a push did: entries that are new at the remote, that were there, that wait or failed.

    `removed` were sent or pulled before, and have been removed at the remote since: they are not
    sent again. `why` is what the remote said where entries wait.
    """

    sent: int = 0
    known: int = 0
    removed: int = 0
    waiting: int = 0
    why: str = ""
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
    """An entry that is being sent: the bytes of its record, their digest, and its names here."""

    parcel: Parcel
    metadata: Metadata
    identity: str
    record: bytes
    names: Names

    @property
    def asked(self) -> Iterator[tuple[str, str]]:
        """Whether these are there: what it is now, and what it was when it was sent before."""
        return ((i, self.metadata.collection) for i in (self.identity, self.parcel.identity) if i)


class Pusher:
    """Drains the outbox of a repo to one remote.

    Args:
        store: The repo.
        url: Where to, as the outbox calls it.
        remote: The remote itself; opened when it is needed where it is None.
        tries: How often an entry is tried while the remote is unavailable; 0: without end.
        threads: Entries that are put at the same time.
        report: Told how far it is.
    """

    def __init__(
        self,
        store: LocalStore,
        url: str,
        *,
        remote: Remote | None = None,
        tries: int = 5,
        threads: int = 16,
        report: Report | None = None,
    ) -> None:
        self._store = store
        self._given = remote
        self._url = url
        self._tries = tries or math.inf
        self._threads = threads
        self._report = report or (lambda _: None)
        self.outbox = Outbox(store.outbox_path)
        self.done = Pushed()
        self._total = 0
        self._counting = threading.RLock()

    @cached_property
    def _remote(self) -> Remote:
        return self._given or open_remote(self._url)

    def close(self) -> None:
        """Closes the remote, where one was opened here."""
        if "_remote" in self.__dict__ and self._given is None:
            self._remote.close()

    def drain(self, wait_s: float = 0.0) -> Pushed:
        """Sends what is in the outbox, until nothing waits or the tries are used up.

        Raises:
            Conflict: Another process pushes this repo to this remote, for all of `wait_s` seconds.
            PermissionDenied, DiskFull: The remote does not let us, or is full; what waits stays in
                the outbox, which says why.
        """
        sweep()
        going = True
        while going:
            with self._alone(wait_s):
                going = self._empty()
            # Who asked in the last moment found us at work, and left it to us.
            going = going and self.outbox.waiting(self._url) > 0
            wait_s = max(wait_s, _TURN_S)
        if not (waiting := self.outbox.waiting(self._url)):
            self.done.why = ""
        self.done.waiting = waiting
        return self.done

    @contextmanager
    def _alone(self, wait_s: float) -> Iterator[None]:
        number = digest_of(self._url.encode())[:16]
        path = self._store.outbox_path.with_name(f"outbox-{number}.lock")
        with ExitStack() as held:
            try:
                held.enter_context(locked(path, timeout_s=wait_s))
            except Conflict as error:
                raise Conflict(
                    f"another push of this repo to {self._url} is at work: it sends these, too",
                    hint="modulelens push --status shows how far it is",
                ) from error
            yield

    def _empty(self) -> bool:
        """Sends until nothing waits; False: the remote cannot be had, and we give up."""
        try:
            if not self.outbox.waiting(self._url):
                _ = self._remote  # an address that is none is said, although nothing goes there
            while parcels := self.outbox.next(self._url):
                self._total = self._count() + self.outbox.waiting(self._url)
                if (pause := min(parcel.due for parcel in parcels) - time.time()) > 0:
                    self._tell(pause, parcels[0].error)
                    time.sleep(min(pause, 1.0))
                elif not self._capture(parcels):
                    return False
        except ModuleLensError as error:
            self.outbox.stuck(self._url, error.message)
            raise
        return True

    def _capture(self, parcels: list[Parcel]) -> bool:
        """Sends entries of one capture; False: the remote cannot be had, and we give up."""
        try:
            entries = list(self._read(parcels))
            known = self._remote.known(dict(chain.from_iterable(e.asked for e in entries)))
            going = [entry for entry in entries if not self._is_removed(entry, known)]
            new = [e.metadata for e in going if e.parcel.again or e.identity not in known]
            places = self._packs(new, [entry.parcel for entry in entries])
            modules: dict[str, list[_Leaving]] = {}
            for entry in sorted(going, key=lambda entry: entry.metadata.version):
                modules.setdefault(entry.metadata.collection, []).append(entry)

            def send(versions: list[_Leaving]) -> None:
                for entry in versions:
                    self._send(entry, known, places)

            spread(send, modules.values(), self._threads)
        except Unavailable as error:
            return self._later(parcels, error)
        return True

    def _is_removed(self, entry: _Leaving, known: dict[str, Version]) -> bool:
        """Whether it was at the remote, and has been removed there; what is found is `known`."""
        parcel, collection = entry.parcel, entry.metadata.collection
        if not parcel.version or not known.keys().isdisjoint((parcel.identity, entry.identity)):
            return False
        try:  # a search may be behind
            there = self._remote.get(collection, str(parcel.version))
        except NotFound:
            if not self._remote.deleted(collection, parcel.version):
                return False  # all of the remote was made anew
        else:
            known |= {there.identity: there} if there.identity == parcel.identity else {}
            return False
        self.outbox.sent(parcel, parcel.identity, parcel.version, parcel.names or "[]")
        self._note(removed=1)
        return True

    def _read(self, parcels: list[Parcel]) -> Iterator[_Leaving]:
        for parcel in parcels:
            try:
                metadata = self._store.metadata(parcel.entry)
            except ModuleLensError as error:
                gone = isinstance(error, NotFound)
                self._fail(parcel, "it was removed here" if gone else error.message, parcel.entry)
                continue
            if "replace" not in self._remote.capabilities:
                parcel = msgspec.structs.replace(parcel, again=0)
            record = record_of(metadata)
            aliases = self._store.aliases(metadata.collection).items()
            mine = [alias for alias, version in aliases if version == metadata.version]
            names = names_of(metadata.tags, mine)
            yield _Leaving(parcel, metadata, digest_of(record), record, names)

    def _packs(self, new: list[Metadata], of: list[Parcel]) -> dict[str, Pack | ModuleLensError]:
        """Puts the packs of entries; gives each blob's pack, or what is wrong here with it."""
        by_blob: dict[str, Pack | ModuleLensError] = {}
        needed = {digest for record in new for digest in record.blobs}
        # Of the whole capture, so that a push that goes on makes the packs that are there already.
        groups = packs.plan(list(self._whole(of[0].capture))) if needed else []
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
                label, again = new[0].model, any(parcel.again for parcel in of)
                for pack in self._remote.put_packs(
                    files, label=label, progress=self._note, again=again
                ):
                    by_blob |= dict.fromkeys(pack.blobs, pack)
        return by_blob

    def _whole(self, capture: str) -> Iterator[Metadata]:
        for parcel in self.outbox.all(self._url, (WAITING, SENT), capture):
            with suppress(ModuleLensError):  # one that cannot be read is not sent
                yield self._store.metadata(parcel.entry)

    def _send(
        self,
        entry: _Leaving,
        known: Mapping[str, Version],
        places: Mapping[str, Pack | ModuleLensError],
    ) -> None:
        there = known.get(entry.identity)
        try:
            names = self._names(entry, there, known.get(entry.parcel.identity))
            if there is not None and not entry.parcel.again:
                self._give(names, there)
                nbytes, version = 0, there.version
            else:
                draft = self._draft(entry, names, places)
                nbytes = len(entry.record) + draft.state.stat().st_size
                if not entry.parcel.identity:
                    self.outbox.begun(entry.parcel, entry.identity)
                version = self._remote.put(draft, again=bool(entry.parcel.again)).version
        except (NotFound, RepoError, UsageError) as error:
            # It is damaged here, or has a name that the remote cannot have: the others go on.
            self._fail(
                entry.parcel, error.message, f"{entry.metadata.name}@v{entry.metadata.version}"
            )
            return
        self.outbox.sent(entry.parcel, entry.identity, version, dump(entry.names))
        self._note(nbytes, sent=int(nbytes > 0), known=int(not nbytes))

    def _names(self, entry: _Leaving, there: Version | None, before: Version | None) -> Names:
        """Those to be given: what was given before is the others' to move and to remove."""
        names, old = entry.names, entry.parcel.names
        if before is not None and old is not None:
            held = names_of(before.row.tags, before.row.aliases)
            names = (names - load(old)) | (names & held)
        elif there is not None and entry.parcel.identity != entry.identity:
            # It came there by another way: nobody's alias is taken from them.
            names = frozenset(n for n in names if n[0] == "tag" or not self._is_taken(n[1], there))
        return names - names_of(there.row.tags, there.row.aliases) if there else names

    def _is_taken(self, alias: str, there: Version) -> bool:
        try:
            holder = self._remote.get(there.collection, alias).version
        except NotFound:
            return False
        return holder != there.version

    def _give(self, names: Names, there: Version) -> None:
        if tags := texts("tag", names):
            self._remote.tag(there, add=tags, remove=())
        if aliases := texts("alias", names):
            self._remote.alias(there, add=aliases, remove=())

    def _draft(
        self, entry: _Leaving, names: Names, places: Mapping[str, Pack | ModuleLensError]
    ) -> Draft:
        metadata = entry.metadata
        needed: dict[str, Pack] = {}
        for digest in metadata.blobs:
            pack = places[digest]
            if isinstance(pack, ModuleLensError):
                raise pack
            needed[pack.name] = pack
        tags = tuple(tag for tag in metadata.tags if ("tag", tag) in names)
        return Draft(
            identity=entry.identity,
            row=row_of(msgspec.structs.replace(metadata, tags=tags), texts("alias", names)),
            record=entry.record,
            state=self._store.state_path(metadata),
            packs=tuple(needed.values()),
            run=metadata.environment.run,
        )

    def _later(self, parcels: list[Parcel], error: Unavailable) -> bool:
        waiting = {p.entry for p in self.outbox.all(self._url, (WAITING,), parcels[0].capture)}
        rest = [parcel for parcel in parcels if parcel.entry in waiting]
        tries = 1 + max((parcel.tries for parcel in rest), default=0)
        pause = error.after_s or min(_FIRST_S * 2 ** (tries - 1), _MOST_S) * random.uniform(0.5, 1)
        self.done.why = error.message
        for parcel in rest:
            self.outbox.later(parcel, error.message, pause)
        return tries < self._tries

    def _fail(self, parcel: Parcel, why: str, name: str) -> None:
        self.outbox.failed(parcel, why)
        with self._counting:
            self.done.failed += (f"{name}: {why}",)

    def _count(self) -> int:
        done = self.done
        return done.sent + done.known + done.removed + len(done.failed)

    def _note(self, nbytes: int = 0, *, sent: int = 0, known: int = 0, removed: int = 0) -> None:
        with self._counting:
            self.done.bytes += nbytes
            self.done.sent += sent
            self.done.known += known
            self.done.removed += removed
            self._tell()

    def _tell(self, waits_s: float = 0.0, why: str = "") -> None:
        self._report(Progress(self._count(), self._total, self.done.bytes, waits_s, why))


def send(
    store: LocalStore,
    url: str,
    records: Sequence[Metadata] = (),
    *,
    tries: int = 5,
    again: bool = False,
    wait_s: float = 0.0,
    report: Report | None = None,
) -> Pushed:
    """Puts entries into the outbox and sends all that is in it; raises what `drain` does.

    With `again` also those that were removed at the remote, and the bytes of those that are there.
    """
    url = checked(url)
    pusher = Pusher(store, url, tries=tries, report=report)
    pusher.outbox.ask(url, records, again=again)
    try:
        return pusher.drain(wait_s)
    finally:
        pusher.close()


def record_of(metadata: Metadata) -> bytes:
    """The bytes whose digest is the entry's identity: all but what a remote gives anew."""
    return to_json(msgspec.structs.replace(metadata, version=0, tags=()))
