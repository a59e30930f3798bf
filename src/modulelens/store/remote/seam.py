"""What a remote is: a place where a team keeps versions of modules. Types only, no network.

Integrity is a chain that no remote is trusted with: a version's identity is the digest of its
record, the record names the digests of `state.pt` and of every blob, a pack is named by that of its
bytes. Whoever fetches checks all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from modulelens.store.facts import Row

#: Names of a version's own files, in the order in which they are fetched.
RECORD, STATE, PACKS = "metadata.json", "state.pt", "packs.json"
OWN_FILES = (RECORD, STATE, PACKS)

#: Called with the number of bytes that came or went since the last call.
Progress = Callable[[int], None]


class Pack(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of blobs that the same entries need, one after the other.

    `name` is the blake3 digest of its bytes; `blobs` maps digests to sizes, in the order of the
    bytes; `place` is where the remote put it, in the remote's own words.
    """

    name: str
    blobs: dict[str, int]
    place: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return sum(self.blobs.values())


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that is about to be put.

    `record` are the bytes of its metadata.json, without version and tags; `identity` is their
    blake3 digest. `row` are the facts to search by, its tags and aliases those to be given.
    `run` is the Weights & Biases run that trained the model, "entity/project/id", where one did.
    """

    identity: str
    row: Row
    record: bytes
    state: Path
    packs: tuple[Pack, ...] = ()
    run: str = ""

    @property
    def collection(self) -> str:
        """Id of the entry's collection."""
        return self.row.id.partition("/")[0]

    @property
    def index(self) -> bytes:
        """The bytes of packs.json."""
        return msgspec.json.encode(self.packs)


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version that a remote has. `row` has its number, tags and aliases there.

    `place` is where it lies, in the remote's own words.
    """

    identity: str
    row: Row
    place: str = ""

    @property
    def collection(self) -> str:
        """Id of its collection."""
        return self.row.id.partition("/")[0]

    @property
    def age(self) -> tuple[str, int]:
        """Grows from older captures to newer ones; of one capture, with its versions."""
        return self.row.date or "", self.version

    @property
    def version(self) -> int:
        """Its number in the collection at this remote; the first is 1, none comes twice."""
        return self.row.version


class Page(msgspec.Struct, frozen=True):
    """Some versions, and where the next ones begin; an empty `cursor`: there are none."""

    versions: tuple[Version, ...]
    cursor: str = ""


class Remote(Protocol):
    """A place that keeps versions. Safe for several threads, and for several processes.

    Every method may raise `Unavailable` (try again later), `PermissionDenied` (final) and
    `Corrupted`. None waits without a limit. What has returned is durable.

    `url` is what people write; `capabilities` are words of: "exclusive" (two writers never get
    one number), "server_search" (filters are evaluated there first), "lineage" (versions are
    linked to the run that trained them), "replace" (bytes can be put in the place of damaged ones).
    """

    url: str
    capabilities: frozenset[str]

    def put_packs(
        self, packs: Mapping[Path, Pack], *, label: str, progress: Progress, again: bool = False
    ) -> tuple[Pack, ...]:
        """Keeps files that are shared; returns the packs with their places, in order.

        One that is there already is not sent again; with `again` it is, if the remote is able to
        "replace". `label` names the capture they are of.
        """

    def put(self, draft: Draft, *, again: bool = False) -> Version:
        """Keeps an entry as the next version of its collection, seen by others whole or not at all.

        One with the same identity is that version, with the draft's tags and aliases added; with
        `again` its files are put anew, if the remote is able to "replace".

        Raises:
            UsageError: A name, tag or alias that this remote cannot have.
        """

    def known(self, identities: Mapping[str, str]) -> dict[str, Version]:
        """Those of the identities (identity -> collection) that are there already."""

    def deleted(self, collection: str, number: int) -> bool:
        """Whether a version that was there and is not has been deleted alone.

        Else all of the remote was made anew.
        """

    def get(self, collection: str, which: str = "") -> Version:
        """A version by its number ("v3", "3") or alias; the newest capture where it says none.

        Raises:
            NotFound: There is none.
        """

    def search(self, filter: Mapping[str, Any], *, limit: int, cursor: str = "") -> Page:
        """Versions that a filter selects; each that was there at the first page comes once."""

    def fetch(self, version: Version, into: Path) -> None:
        """Brings a version's own files into a folder that is empty. Not checked yet.

        Raises:
            NotFound: It has been deleted.
        """

    def fetch_packs(self, packs: Sequence[Pack], into: Path, *, progress: Progress) -> None:
        """Brings packs into a folder that is empty, under their names. Not checked yet."""

    def alias(self, version: Version, *, add: Sequence[str], remove: Sequence[str]) -> None:
        """Moves aliases to a version, and takes others from it."""

    def tag(self, version: Version, *, add: Sequence[str], remove: Sequence[str]) -> None:
        """Changes a version's tags."""

    def delete(self, version: Version, *, force: bool = False) -> None:
        """Deletes a version; its number never comes back. Packs stay until nobody needs them.

        Raises:
            Conflict: An alias points at it, and `force` is False.
        """

    def close(self) -> None:
        """Ends what runs in the background, within seconds."""
