"""A remote that is a folder, mounted or of an object store. No server: whoever writes keeps order.

format.json                                   schema version, and an id
index/<collection>/<number>.json              identity and searchable facts; made, never replaced
index/<collection>/<number>.deleted           says that this version is no more
index/<collection>/tags/<identity>/<digest>   a tag
index/<collection>/aliases/<digest>           an alias, and the number it points at
files/<collection>/<identity>/...             metadata.json, state.pt, packs.json
packs/ab/abcd...                              packs, by the digest of their bytes
tmp/                                          drafts, where the file system has no whole objects

A version is there once its number is: files come first. Numbers are made one after the other, each
by one writer only, who has read all before it; so nobody puts an entry twice, and what a dead
writer left is found by the next one.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from modulelens.errors import Conflict, Corrupted, NotFound, SchemaTooNew, Unavailable
from modulelens.records import from_json, to_json
from modulelens.store.entries import check_alias
from modulelens.store.facts import Row
from modulelens.store.files import digest_of
from modulelens.store.layout import DIGEST
from modulelens.store.query import matches
from modulelens.store.remote.objects import Objects
from modulelens.store.remote.seam import (
    OWN_FILES,
    PACKS,
    RECORD,
    STATE,
    Draft,
    Pack,
    Page,
    Progress,
    Version,
)
from modulelens.store.remote.seen import Seen, cache_folder
from modulelens.store.remote.spread import spread

FORMAT = 1
_TRIES = 1000
_PACK_THREADS = 4
_NUMBER = re.compile(r"v?([1-9][0-9]{0,8})")
_MADE = re.compile(r"index/([0-9a-f]{32})/([1-9][0-9]{0,8})\.(json|deleted)")
_TAG = re.compile(r"index/([0-9a-f]{32})/tags/([0-9a-f]{64})/[0-9a-f]{32}")
_ALIAS = re.compile(r"index/([0-9a-f]{32})/aliases/[0-9a-f]{32}")


class _Made(msgspec.Struct):
    """What a number's file holds."""

    identity: str
    row: Row


class _Name(msgspec.Struct):
    """A tag, or an alias and the number it points at."""

    text: str
    version: int = 0


class _Format(msgspec.Struct, omit_defaults=True):
    """`id` is another one for each remote that is made, also at the address of an older one."""

    schema: int
    id: str = ""


T = TypeVar("T", _Made, _Name)


class FolderRemote:
    """Implements `seam.Remote` on a folder.

    Raises:
        EnvironmentLacks: The file system's package is not installed.
        SchemaTooNew: A newer ModuleLens made the folder's format.
        Unavailable, PermissionDenied: It cannot be reached, or not be read.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self._objects = Objects(url, options)
        self.capabilities = frozenset(["replace"] + ["exclusive"] * self._objects.exclusive)
        # Objects that were read and are never rewritten, by their names.
        self._made: dict[str, _Made | None] = {}
        self._names: dict[str, _Name] = {}
        self._checked = self._swept = self._tried = False
        self._format = _Format(FORMAT, os.urandom(16).hex())
        self._seen: Seen | None = None
        self._kept: dict[str, bytes] = {}

    # ---- putting

    def put_packs(
        self,
        packs: Mapping[Path, Pack],
        *,
        label: str,  # noqa: ARG002  files here are named by their bytes
        progress: Progress,
        again: bool = False,
    ) -> tuple[Pack, ...]:
        """See `seam.Remote`."""
        self._open(write=True)

        def put(item: tuple[Path, Pack]) -> Pack:
            path, pack = item
            progress(self._objects.put_file(_pack(pack), path, again=again))
            return pack

        return tuple(spread(put, packs.items(), _PACK_THREADS))

    def put(self, draft: Draft, *, again: bool = False) -> Version:
        """See `seam.Remote`."""
        for alias in draft.row.aliases:
            check_alias(alias)
        self._open(write=True)
        collection, folder = draft.collection, f"{draft.collection}/{draft.identity}"
        made = self._numbers(self._listed(collection))
        found = _number_of(draft, made)
        if found is None or again:
            self._objects.put(f"files/{folder}/{RECORD}", draft.record)
            self._objects.put(f"files/{folder}/{STATE}", draft.state.read_bytes())
            self._objects.put(f"files/{folder}/{PACKS}", draft.index)
        if found is None:
            found = self._number(draft, made)
        self._name(f"index/{collection}/tags/{draft.identity}", draft.row.tags)
        self._name(f"index/{collection}/aliases", draft.row.aliases, found)
        row = msgspec.structs.replace(draft.row, id=f"{collection}/{found}", version=found)
        return Version(identity=draft.identity, row=row)

    def _try_exclusion(self) -> None:
        """Some object stores take a conditional put, and ignore the condition."""
        tried, self._tried = self._tried, True
        if tried or "exclusive" not in self.capabilities:
            return
        if self._objects.make("format.json", to_json(self._format)):
            self.capabilities -= {"exclusive"}
            warnings.warn(
                f"{self.url} replaces what it should only make: of two who push a module in the "
                "same moment, one may lose it",
                stacklevel=2,
            )

    def _number(self, draft: Draft, made: dict[tuple[str, int], _Made | None]) -> int:
        self._try_exclusion()
        row = msgspec.structs.replace(draft.row, version=0, tags=(), aliases=())
        data = to_json(_Made(draft.identity, row))
        for _ in range(_TRIES):
            number = 1 + max((n for _, n in made), default=0)
            name = f"index/{draft.collection}/{number}.json"
            if self._objects.make(name, data):
                return number
            # It is there, but may be listed late: read by its name, so that none is passed by.
            made = self._numbers([*self._listed(draft.collection), name])
            if (found := _number_of(draft, made)) is not None:
                return found
        text = f"{self.url}: {_TRIES} other writers were faster at {draft.row.name}"
        raise Unavailable(text, hint="try again")

    def _name(self, folder: str, texts: Iterable[str], version: int = 0) -> None:
        for text in texts:
            self._objects.put(f"{folder}/{_hashed(text)}", to_json(_Name(text, version)))

    # ---- finding

    def known(self, identities: Mapping[str, str]) -> dict[str, Version]:
        """See `seam.Remote`."""
        self._open()
        collections = dict.fromkeys(identities.values())
        found = {v.identity: v for vs in spread(self._scan, collections) for v in vs}
        return {identity: found[identity] for identity in identities if identity in found}

    def deleted(self, collection: str, number: int) -> bool:
        """See `seam.Remote`."""
        return f"index/{collection}/{number}.deleted" in self._listed(collection)

    def get(self, collection: str, which: str = "") -> Version:
        """See `seam.Remote`."""
        self._open()
        versions = self._scan(collection)
        number = _NUMBER.fullmatch(which)
        fits = [
            version
            for version in versions
            if not which
            or (version.version == int(number[1]) if number else which in version.row.aliases)
        ]
        if not fits:
            name = versions[0].row.name if versions else f"collection {collection}"
            there = ", ".join(f"v{version.version}" for version in versions[-5:]) or "none"
            raise NotFound(
                f"{self.url} has no {name}{'@' if which else ''}{which}",
                hint=f"versions there: {there}",
            )
        return max(fits, key=lambda version: version.age)

    def search(self, filter: Mapping[str, Any], *, limit: int, cursor: str = "") -> Page:
        """See `seam.Remote`."""
        self._open()
        found = [version for version in self._scan() if matches(version.row, filter)]
        found = [version for version in found if _key(version) > cursor]
        more = len(found) > limit
        return Page(tuple(found[:limit]), _key(found[limit - 1]) if more else "")

    def _scan(self, collection: str = "") -> list[Version]:
        """All versions, of one collection or of all, in order, with tags and aliases of now."""
        names = self._listed(collection)
        tagged: dict[str, list[str]] = {}
        for (home, identity), tag in self._named(names, _TAG, keep=True):
            tagged.setdefault(f"{home}/{identity}", []).append(tag.text)
        aliased: dict[str, list[str]] = {}
        for (home,), alias in self._named(names, _ALIAS):
            aliased.setdefault(f"{home}/{alias.version}", []).append(alias.text)
        found = []
        for (home, number), one in self._numbers(names).items():
            if one is not None:
                row = msgspec.structs.replace(
                    one.row,
                    id=f"{home}/{number}",
                    version=number,
                    tags=tuple(sorted(tagged.get(f"{home}/{one.identity}", ()))),
                    aliases=tuple(sorted(aliased.get(f"{home}/{number}", ()))),
                )
                found.append(Version(identity=one.identity, row=row))
        return found

    def _listed(self, collection: str = "") -> list[str]:
        return self._objects.names(f"index/{collection}".rstrip("/"))

    def _named(
        self, names: list[str], kind: re.Pattern[str], *, keep: bool = False
    ) -> list[tuple[tuple[str, ...], _Name]]:
        """Tags or aliases, each with the parts of its name; `keep`: they never change."""
        parts = {name: part.groups() for name in names if (part := kind.fullmatch(name))}
        new = [name for name in parts if name not in self._names]
        found = self._read(new, _Name, keep=keep)
        if keep:
            self._names |= {name: one for name, one in found.items() if one}
        found = {name: self._names.get(name) or found.get(name) for name in parts}
        return [(parts[name], one) for name, one in found.items() if one]

    def _numbers(self, names: list[str]) -> dict[tuple[str, int], _Made | None]:
        """Collection and number of versions, in order; None: deleted, or it cannot be read."""
        parts = {name: part.groups() for name in names if (part := _MADE.fullmatch(name))}
        new = [n for n, (*_, kind) in parts.items() if kind == "json" and n not in self._made]
        self._made |= self._read(new, _Made, keep=True)
        found: dict[tuple[str, int], _Made | None] = {}
        for name, (home, number, kind) in parts.items():
            if kind == "deleted":
                found[home, int(number)] = None
            elif name in self._made:
                found.setdefault((home, int(number)), self._made[name])
        return dict(sorted(found.items()))

    def _read(self, names: list[str], kind: type[T], *, keep: bool = False) -> dict[str, T | None]:
        """What objects hold, None where that is no such thing: one never hides the others.

        With `keep` they never change, and are read once on this machine.
        """
        found: dict[str, T | None] = {}
        kept = {name: self._kept[name] for name in names if keep and name in self._kept}
        came = self._objects.read_all([name for name in names if name not in kept])
        for name, data in (kept | came).items():
            one: T | None = None
            with suppress(Corrupted):
                one = from_json(data, kind, what=name)
            if one is None or (isinstance(one, _Made) and not _fits(one, name)):
                warnings.warn(f"{self.url}/{name} is left out: it is damaged", stacklevel=2)
                one = None
            found[name] = one
        if keep and self._seen:
            self._seen.keep({name: data for name, data in came.items() if found[name]})
        return found

    # ---- fetching

    def fetch(self, version: Version, into: Path) -> None:
        """See `seam.Remote`."""
        folder = f"files/{version.collection}/{version.identity}"
        spread(lambda name: self._objects.get_file(f"{folder}/{name}", into / name), OWN_FILES)

    def fetch_packs(self, packs: Sequence[Pack], into: Path, *, progress: Progress) -> None:
        """See `seam.Remote`."""

        def fetch(pack: Pack) -> None:
            self._objects.get_file(_pack(pack), into / pack.name)
            progress(pack.nbytes)

        spread(fetch, packs, _PACK_THREADS)

    # ---- changing

    def alias(self, version: Version, *, add: Sequence[str], remove: Sequence[str]) -> None:
        """See `seam.Remote`."""
        for alias in add:
            check_alias(alias)
        folder = f"index/{version.collection}/aliases"
        held = self.get(version.collection, str(version.version)).row.aliases
        for text in set(remove).intersection(held):
            self._objects.remove(f"{folder}/{_hashed(text)}")
        self._name(folder, add, version.version)

    def tag(self, version: Version, *, add: Sequence[str], remove: Sequence[str]) -> None:
        """See `seam.Remote`."""
        folder = f"index/{version.collection}/tags/{version.identity}"
        for text in remove:
            self._objects.remove(f"{folder}/{_hashed(text)}")
        self._name(folder, add)

    def delete(self, version: Version, *, force: bool = False) -> None:
        """See `seam.Remote`."""
        held = self.get(version.collection, str(version.version)).row.aliases
        if held and not force:
            raise Conflict(
                f"{version.row.name}@v{version.version} has the alias {', '.join(held)}",
                hint="move the alias first, or delete with force",
            )
        self.alias(version, add=(), remove=held)
        self._objects.put(f"index/{version.collection}/{version.version}.deleted", b"")
        if version.identity in self.known({version.identity: version.collection}):
            return  # put again meanwhile: the files are those of another number now
        homes = (f"files/{version.collection}", f"index/{version.collection}/tags")
        for home in homes:
            for name in self._objects.names(f"{home}/{version.identity}"):
                self._objects.remove(name)

    def close(self) -> None:
        """Nothing runs in the background."""

    def _open(self, *, write: bool = False) -> None:
        self._checked = self._checked or self._check_format(write=write)
        if write and not self._swept:
            self._objects.sweep()
            self._swept = True

    def _check_format(self, *, write: bool) -> bool:
        try:
            data = self._objects.read("format.json")
        except NotFound:
            if not write:
                return False
            self._objects.make("format.json", to_json(self._format))
            data = self._objects.read("format.json")  # another writer may have been faster
        self._format = from_json(data, _Format, what=f"{self.url}/format.json")
        if (schema := self._format.schema) > FORMAT:
            raise SchemaTooNew(
                f"{self.url} has format {schema}, this ModuleLens reads up to {FORMAT}",
                hint="pip install --upgrade modulelens",
            )
        if self._objects.far and re.fullmatch("[0-9a-f]{32}", self._format.id):
            self._seen = Seen(cache_folder(self.url).with_name(f"seen-{self._format.id}.sqlite"))
            self._kept = self._seen.read()
        return True


def _pack(pack: Pack) -> str:
    return f"packs/{pack.name[:2]}/{pack.name}"


def _number_of(draft: Draft, made: Mapping[tuple[str, int], _Made | None]) -> int | None:
    return next((n for (_, n), one in made.items() if one and one.identity == draft.identity), None)


def _fits(one: _Made, name: str) -> bool:
    home = one.row.id.partition("/")[0]
    return home == name.split("/")[1] and DIGEST.fullmatch(one.identity) is not None


def _hashed(text: str) -> str:
    return digest_of(text.encode(errors="surrogatepass"))[:32]


def _key(version: Version) -> str:
    return f"{version.collection}/{version.version:09d}"
