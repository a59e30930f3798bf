"""A Weights & Biases registry as a remote: a collection per module, its versions are links.

Version N here is W&B's v(N-1): theirs start at 0. A version links to an artifact of type `module`
in the project of the run that trained the model (else in `modulelens`); its packs are artifacts of
type `module-pack` in `modulelens`.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from modulelens.errors import (
    Conflict,
    Corrupted,
    ModuleLensError,
    NotFound,
    PermissionDenied,
    UsageError,
)
from modulelens.store.entries import check_alias
from modulelens.store.files import digest_of
from modulelens.store.query import matches, parse
from modulelens.store.remote import registry_search as facts
from modulelens.store.remote.registry_session import PAGE, Session, named, sdk, status_of
from modulelens.store.remote.seam import OWN_FILES, Draft, Pack, Page, Progress, Version
from modulelens.store.remote.spread import spread

PROJECT = "modulelens"
_NUMBER = re.compile(r"v?(\d{1,9})", re.ASCII)
_URL = re.compile(r"wandb://(?:(?P<entity>[\w.-]+)/)?(?P<registry>[^/\\#?%:]{0,113})")


class RegistryRemote:
    """See `seam.Remote`.

    Args:
        url: `wandb://entity/registry`, or `wandb://registry` for the key's own entity; a registry
            without a name is called `modulelens`.

    Raises:
        UsageError: It is no such URL, or the entity is in no organization.
        EnvironmentLacks: The package wandb is missing.
        PermissionDenied: There is no key, or W&B does not know it.
        Unavailable: W&B does not answer, or is switched off here.
    """

    capabilities = frozenset({"exclusive", "server_search", "lineage"})

    def __init__(self, url: str) -> None:
        entity, self._name = parts_of(url)
        self.url = url
        self._session = Session(entity)
        self._path = f"{self._session.organization.org_entity.name}/wandb-registry-{self._name}"
        # Tags are the artifact's own: an entry that is in two registries is two artifacts.
        self._suffix = re.sub(r"[^\w.-]", "-", self._name, flags=re.ASCII)[:90]
        self._registry: Any = None
        self._places: dict[str, str] = {}
        self._filters = True
        self._absent: set[str] = set()  # identities that were asked for in vain; a put looks again

    def put_packs(
        self,
        packs: Mapping[Path, Pack],
        *,
        label: str,
        progress: Progress,
        again: bool = False,  # noqa: ARG002  nothing that is there can be replaced
    ) -> tuple[Pack, ...]:
        """See `seam.Remote`. A bundle is named after what it holds, and so is found again."""
        new = {pack.name: path for path, pack in packs.items() if pack.name not in self._places}
        if new:
            name = f"packs-{digest_of(''.join(sorted(new)).encode())[:32]}"
            where = f"{self._session.entity}/{PROJECT}/{name}"
            try:
                bundle = self._session.artifact(f"{where}:latest")
            except NotFound:
                bundle = self._session.upload(
                    PROJECT,
                    new,
                    name=name,
                    type="module-pack",
                    description=f"Tensors of {label}",
                    metadata={"label": label},
                )
                progress(sum(pack.nbytes for pack in packs.values() if pack.name in new))
            self._places |= dict.fromkeys(new, f"{where}:{bundle.version}")
        return tuple(Pack(p.name, p.blobs, self._places[p.name]) for p in packs.values())

    def put(self, draft: Draft, *, again: bool = False) -> Version:  # noqa: ARG002
        """See `seam.Remote`; nothing that is there can be replaced."""
        _check_aliases(draft.row.aliases)
        version = None
        if draft.identity not in self._absent:
            version = self.known({draft.identity: draft.collection}).get(draft.identity)
        if version is None:
            version = self._put_new(draft)
            self._absent.discard(draft.identity)
        aliases = [alias for alias in draft.row.aliases if alias not in version.row.aliases]
        tags = [tag for tag in draft.row.tags if tag not in version.row.tags]
        if aliases:
            self.alias(version, add=aliases, remove=())
        if tags:
            self.tag(version, add=tags, remove=())
        return self.get(version.collection, str(version.version)) if aliases or tags else version

    def _put_new(self, draft: Draft) -> Version:
        entity, _, rest = draft.run.partition("/")
        project = rest.partition("/")[0] if entity == self._session.entity else ""
        self._find_registry(create=True)
        row = draft.row
        described = f"{row.model}/{row.fqn}: {row.cls}" + (f" in {row.file}" if row.file else "")
        artifact = self._session.upload(
            project or PROJECT,
            dict(zip(OWN_FILES, (draft.record, draft.state, draft.index), strict=True)),
            [tag for tag in row.tags if facts.is_native(tag)],
            name=f"{draft.collection}-{self._suffix}",
            type="module",
            description=described,
            metadata=facts.metadata_of(draft),
        )
        if project:
            try:
                with sdk(f"run {draft.run}"):
                    self._session.api.run(draft.run).log_artifact(artifact)
            except ModuleLensError as error:  # the metadata names the run, too
                warnings.warn(f"{row.name} is not shown at its {error.message}", stacklevel=3)
        with sdk(f"linking {row.name} to {self._path}"):
            linked = artifact.link(f"{self._path}/{draft.collection}", aliases=row.aliases)
        version = _version(linked)
        if version.version > 1:
            first = self.known({draft.identity: draft.collection}).get(draft.identity, version)
            if first.version < version.version:  # somebody else put the same meanwhile
                with suppress(NotFound, PermissionDenied), sdk(version.place):
                    linked.unlink()
                return first
        else:
            with suppress(PermissionDenied), named(version.place):  # who links may not always edit
                collection = linked.collection
                collection.description = described
                collection.save()
        return version

    def known(self, identities: Mapping[str, str]) -> dict[str, Version]:
        """See `seam.Remote`."""
        found: dict[str, Version] = {}
        rest = iter(identities)
        while chunk := list(islice(rest, PAGE)):
            at, more = "", True
            while more:
                versions, at = self._page({"metadata.identity": {"$in": chunk}}, at)
                for version in versions:
                    if identities.get(version.identity) == version.collection:
                        other = found.get(version.identity, version)
                        found[version.identity] = min(version, other, key=lambda v: v.version)
                more = bool(at)
        self._absent |= identities.keys() - found.keys()
        return found

    def get(self, collection: str, which: str = "") -> Version:
        """See `seam.Remote`."""
        number = _NUMBER.fullmatch(which)
        alias = f"v{int(number[1]) - 1}" if number else which or "latest"
        if re.search(r"[/:\s]", collection + alias) or alias == "v-1":
            raise NotFound(f"{self.url} has no {collection}@{which}")
        found = _version(self._session.artifact(f"{self._path}/{collection}:{alias}"))
        if which or found.version == 1:
            return found
        # W&B's latest is what was put last, which may be an older capture that was graded late.
        same = {"model": found.row.model, "fqn": found.row.fqn}
        others = self.search(same, limit=sys.maxsize).versions
        return max([found, *others], key=lambda version: version.age)

    def deleted(self, collection: str, number: int) -> bool:  # noqa: ARG002
        """See `seam.Remote`; W&B keeps no record of what was deleted."""
        return self._find_registry() is not None

    def search(self, filter: Mapping[str, Any], *, limit: int, cursor: str = "") -> Page:
        """See `seam.Remote`."""
        narrowed = facts.pushed(parse(filter))
        at, seen = facts.resume(cursor)
        if not cursor:
            self._session.found.clear()
        found: list[Version] = []
        while True:
            versions, after = self._page(narrowed, at)
            for version in versions:
                key = facts.key_of(version)
                if key in seen or not matches(version.row, filter):
                    continue
                if len(found) == limit:
                    return Page(tuple(found), facts.pause(at, seen))
                found.append(version)
                seen.add(key)
            if not after:
                return Page(tuple(found))
            at = after

    def _page(self, filter: dict[str, Any] | None, at: str) -> tuple[list[Version], str]:
        """Modules in a page of the registry; all in it, where W&B does not know the filter."""
        registry = self._find_registry()
        if registry is None:
            return [], ""
        try:
            with sdk(f"searching {self._path}"):
                wanted = filter if self._filters else None
                page = registry.versions(filter=wanted, per_page=PAGE, start=at or None)
                next(page, None)  # it loads pages until one holds something
        except PermissionDenied:
            if not wanted:
                raise
            self._filters = False
            return self._page(None, at)
        versions = []
        for artifact in page.objects:
            try:
                if artifact.type == "module":
                    versions.append(version := _version(artifact))
                    self._session.found[version.place] = artifact
            except Corrupted as error:  # one bad entry never hides the others
                warnings.warn(f"left out of the search: {error.message}", stacklevel=4)
        return versions, (page.cursor or "") if page.more else ""

    def _find_registry(self, *, create: bool = False) -> Any:
        """The registry; None where there is none, and it is not to be made."""
        with sdk(f"registry {self._path}"):
            if self._registry is None:
                self._registry = self._existing()
            if self._registry is None and create:
                self._registry = self._created()
            return self._registry

    def _existing(self) -> Any:
        organization = self._session.organization.name
        try:
            return self._session.api.registry(self._name, organization=organization)
        except ValueError as error:
            if error.__cause__ and status_of(error.__cause__) != 404:
                raise
            return None

    def _created(self) -> Any:
        try:
            with named(f"creating registry {self._path}"):
                return self._session.api.create_registry(
                    self._name,
                    visibility="organization",
                    organization=self._session.organization.name,
                    description="Modules of models, captured in training by ModuleLens.",
                    artifact_types=["module"],
                )
        except PermissionDenied as error:
            if found := self._existing():  # somebody else made it meanwhile
                return found
            error.hint = (
                "ask an admin of the organization to create it in the W&B app, with the artifact "
                "type 'module', and to give you a role that may write"
            )
            raise

    def fetch(self, version: Version, into: Path) -> None:
        """See `seam.Remote`."""
        self._session.download(version.place, OWN_FILES, into, lambda _: None)

    def fetch_packs(self, packs: Sequence[Pack], into: Path, *, progress: Progress) -> None:
        """See `seam.Remote`."""
        places: dict[str, list[str]] = {}
        for pack in packs:
            places.setdefault(pack.place, []).append(pack.name)
        spread(lambda one: self._session.download(*one, into, progress), places.items(), 4)

    def alias(self, version: Version, *, add: Sequence[str], remove: Sequence[str]) -> None:
        """See `seam.Remote`."""
        _check_aliases(add)
        with sdk(f"aliases of {version.place}"):
            linked = self._session.artifact(version.place)
            linked.aliases = _edited(linked.aliases, add, remove)
            linked.save()

    def tag(self, version: Version, *, add: Sequence[str], remove: Sequence[str]) -> None:
        """See `seam.Remote`."""
        with sdk(f"tags of {version.place}"):
            linked = self._session.artifact(version.place)
            tags = _edited(_version(linked).row.tags, add, remove)
            source = linked.source_artifact
            source.tags = [tag for tag in tags if facts.is_native(tag)]
            source.metadata = {**source.metadata, "tags": tags}
            source.save()

    def delete(self, version: Version, *, force: bool = False) -> None:
        """See `seam.Remote`. The artifact goes, too, where no other registry links to it."""
        self._session.found.pop(version.place, None)
        with sdk(f"deleting {version.place}"):
            linked = self._session.artifact(version.place)
            held = _version(linked).row.aliases
            if held and not force:
                raise Conflict(
                    f"{version.row.name} version {version.version} has the alias {', '.join(held)}",
                    hint="move the alias first, or delete with force",
                )
            source = linked.source_artifact
            linked.unlink()
            if not source.linked_artifacts:
                source.delete(delete_aliases=True)

    def close(self) -> None:
        """See `seam.Remote`."""
        self._session.close()


def parts_of(url: str) -> tuple[str, str]:
    """The entity of a registry's URL, empty for the key's own, and its name.

    Raises:
        UsageError: It is no such URL.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise UsageError(f"{url!r:.200} names no registry", hint="wandb://entity/registry")
    return found["entity"] or "", found["registry"] or PROJECT


def _version(artifact: Any) -> Version:
    name = artifact.name.partition(":")[0]
    place = f"{artifact.entity}/{artifact.project}/{name}:{artifact.version}"
    return facts.version_of(artifact.metadata, place, artifact.aliases, artifact.tags)


def _edited(names: Sequence[str], add: Sequence[str], remove: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*(name for name in names if name not in remove), *add]))


def _check_aliases(aliases: Sequence[str]) -> None:
    for alias in aliases:
        check_alias(alias)
        if alias == "latest" or re.search("[/:]", alias) or len(alias) > 128:
            raise UsageError(
                f"{alias!r:.150} cannot be an alias in W&B",
                hint="up to 128 characters, no '/' or ':'; 'latest' is always the newest version",
            )
