"""A remote -> a repo's folder: fetched aside, every byte checked, then put in. Nothing is trusted.

An entry that is there already, by its identity, is not fetched; nor is a blob.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from modulelens.errors import Corrupted, NotFound, RepoError
from modulelens.records import Metadata, from_json, read_metadata
from modulelens.store.files import MOST_JSON_BYTES, digest_of, digest_of_file, read_regular
from modulelens.store.layout import DIGEST
from modulelens.store.local import LocalStore
from modulelens.store.query import Filter
from modulelens.store.remote import packs
from modulelens.store.remote.outbox import Outbox
from modulelens.store.remote.push import record_of
from modulelens.store.remote.seam import PACKS, RECORD, STATE, Pack, Progress, Remote, Version
from modulelens.store.remote.spool import spool
from modulelens.store.remote.spread import spread
from modulelens.store.resolve import resolve_at

_AGAIN = "`modulelens push --again` from where it was captured"
#: What is said of a place that may be mistyped.
EMPTY = "there are no entries at"
_PAGE = 100_000
#: Most bytes of packs that are fetched before they are put in.
_BATCH_BYTES = 1 << 30
#: Records that are fetched before their entries are put in.
_AT_ONCE = 32


class Fetched(msgspec.Struct, frozen=True):
    """A version's own files, checked: its record, and the packs that its blobs are in."""

    metadata: Metadata
    packs: tuple[Pack, ...]
    state: bytes


def fetch(remote: Remote, version: Version) -> Fetched:
    """Brings a version without its blobs.

    Raises:
        NotFound: It has been deleted.
        Corrupted: What came is not what was put.
    """
    with spool() as folder:
        remote.fetch(version, folder)
        record = _read(folder, RECORD)
        what = f"{version.row.name}@v{version.version} of {remote.url}"
        if digest_of(record) != version.identity:
            raise Corrupted(f"{what}: its record came with other bytes", hint="pull again")
        metadata = read_metadata(record, what=what)
        if metadata.collection != version.collection:
            raise Corrupted(f"{what} is the record of {metadata.name}", hint=_AGAIN)
        found = from_json(_read(folder, PACKS), tuple[Pack, ...], what=f"packs.json of {what}")
        if (
            not (folder / STATE).is_file()
            or digest_of_file(folder / STATE) != metadata.state_digest
        ):
            raise Corrupted(f"{what}: state.pt came with other bytes", hint="pull again")
        state = (folder / STATE).read_bytes()
    held = sorted(blob for pack in found for blob in pack.blobs.items())
    named = all(DIGEST.fullmatch(pack.name) for pack in found)
    if not named or held != sorted(metadata.blobs.items()) or any(size < 0 for _, size in held):
        raise Corrupted(f"{what}: its packs do not hold what it needs, each once", hint=_AGAIN)
    tags = version.row.tags
    metadata = msgspec.structs.replace(metadata, version=version.version, tags=tags)
    return Fetched(metadata, found, state)


def fetch_blobs(
    store: LocalStore, remote: Remote, needed: Iterable[Pack], progress: Progress
) -> None:
    """Brings the blobs of packs that the repo lacks; the caller keeps gc away.

    Raises:
        Corrupted: What came is not what was put; nothing of that pack stays.
    """
    lacking = [p for p in needed if not all(_has(store, *blob) for blob in p.blobs.items())]
    sizes = {pack.name: dict.fromkeys([pack.name], pack.nbytes) for pack in lacking}
    by_name = {pack.name: pack for pack in lacking}
    for batch in packs.bundles(sizes.values(), _BATCH_BYTES):
        with spool(store.root / "tmp") as folder:  # the system's may be small, or in memory
            chosen = [by_name[name] for group in batch for name in group]
            remote.fetch_packs(chosen, folder, progress=progress)
            for pack in chosen:
                if not (path := folder / pack.name).exists():
                    raise NotFound(f"{remote.url} has no pack {pack.name} any more", hint=_AGAIN)
                store.put_blobs(list(packs.blobs_in(path, pack)))


def pull(
    store: LocalStore,
    remote: Remote,
    versions: Sequence[Version],
    *,
    progress: Progress | None = None,
) -> list[Metadata]:
    """Brings versions into a repo; returns their records there, in order.

    Each gets the next free number of its collection, the oldest capture first.
    """
    report = progress or (lambda _: None)
    ordered = sorted(versions, key=lambda version: version.age)
    here: dict[str, Metadata] = {}
    for collection in {version.collection for version in versions}:
        here |= _here(store, collection)
    with store.adding():
        for start in range(0, len(ordered), _AT_ONCE):
            part = ordered[start : start + _AT_ONCE]
            try:
                _bring(store, remote, part, here, report)
            except (NotFound, Corrupted):  # one of them: those before it are kept
                for version in part:
                    _bring(store, remote, [version], here, report)
    return [here[version.identity] for version in versions]


def _bring(
    store: LocalStore,
    remote: Remote,
    versions: Sequence[Version],
    here: dict[str, Metadata],
    report: Progress,
) -> None:
    """Puts those in that are not here yet, in their order, and gives all their aliases.

    Records come side by side.
    """
    new = {v.identity: v for v in versions if v.identity not in here}
    fetched = spread(partial(fetch, remote), new.values())
    needed = {pack.name: pack for one in fetched for pack in one.packs}
    fetch_blobs(store, remote, needed.values(), report)
    stored = store.put_entries([(one.metadata, one.state) for one in fetched])
    here |= zip(new, stored, strict=True)
    pairs = [(version, here[version.identity]) for version in versions]
    for version, found in pairs:
        for alias in version.row.aliases:
            if store.aliases(version.collection).get(alias) != found.version:
                store.alias(found.id, alias)
    Outbox(store.outbox_path).came(remote.url, pairs)


def chosen(remote: Remote, ref: str | None, filter: Filter) -> list[Version]:
    """The versions that a reference, or else a filter, means.

    Raises:
        NotFound: There are none.
    """

    def names(text: str) -> list[str]:
        found = remote.search({"name": {"$contains": text}} if text else {}, limit=_PAGE)
        return list(dict.fromkeys(version.row.name for version in found.versions))

    def hint(usual: str) -> str:
        empty = not remote.search({}, limit=1).versions
        return f"{EMPTY} {remote.url}: is it the right place?" if empty else usual

    if ref is None:
        if found := everything(remote, filter):
            return found
        usual = hint("modulelens find --remote URL")
        raise NotFound(f"{remote.url} has no entry that fits", hint=usual)
    try:
        return [resolve_at(ref, remote.get, names, remote.url)]
    except NotFound as error:
        error.hint = hint(error.hint)
        raise


def everything(remote: Remote, filter: Filter) -> list[Version]:
    """All versions that a filter selects, page by page."""
    page = remote.search(filter, limit=_PAGE)
    found = list(page.versions)
    while page.cursor:
        page = remote.search(filter, limit=_PAGE, cursor=page.cursor)
        found += page.versions
    return found


def _here(store: LocalStore, collection: str) -> dict[str, Metadata]:
    """The entries of a collection that can be read, by their identities."""
    found = {}
    for number in store.versions(collection):
        with suppress(NotFound, RepoError):
            metadata = store.metadata(f"{collection}/{number}")
            found[digest_of(record_of(metadata))] = metadata
    return found


def _has(store: LocalStore, digest: str, size: int) -> bool:
    try:
        return store.blob_path(digest, verify=False).stat().st_size == size
    except (NotFound, FileNotFoundError):
        return False


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_regular(folder / name)
    except NotFound as error:
        text = f"{name} did not come, or is over {MOST_JSON_BYTES:,} bytes"
        raise Corrupted(text, hint=_AGAIN) from error
