"""What the stand-in server holds: projects, collections, versions, links, runs.

Public attributes and methods are the GraphQL fields of the type, with the server's names and
arguments; names with an underscore are the server's own. Ids are base64, as the SDK decodes them.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.filters import in_metadata, in_order, loaded, matches
from tests.wandb_server.storage import base64_md5, hexadecimal

if TYPE_CHECKING:
    from tests.wandb_server.world import World

REGISTRY_PREFIX = "wandb-registry-"
LATEST = "latest"


def identifier(kind: str, number: int) -> str:
    return base64.b64encode(f"{kind}:{number}".encode()).decode()


def stamp(seconds: float) -> str:
    """A point in time as the server writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def connection(items: Sequence[Any], first: int | None, after: str | None) -> dict[str, Any]:
    """One page, relay style; a cursor is the decimal offset and opaque to the client."""
    start = int(after or 0)
    page = items[start : start + (50 if first is None else first)]
    end = start + len(page)
    return {
        "__typename": "Connection",
        "totalCount": len(items),
        "pageInfo": {
            "__typename": "PageInfo",
            "endCursor": str(end) if page else None,
            "hasNextPage": end < len(items),
        },
        "edges": [
            {
                "__typename": "Edge",
                "node": item,
                "cursor": str(start + place + 1),
                "version": f"v{getattr(item, 'versionIndex', 0)}",
            }
            for place, item in enumerate(page)
        ],
    }


def chosen(
    items: Sequence[Any], filters: str | None, order: str | None, look: Callable[..., list[Any]]
) -> list[Any]:
    """The items that fulfil a filter, in order; `look(item, field)` gives a field's values."""
    condition = loaded(filters)
    found = [item for item in items if matches(condition, partial(look, item))]
    in_order(found, order, look)
    return found


def see(item: Any, name: str) -> list[Any]:
    """An item's values under the name of a filter field."""
    return item._see(name)


def no_field(kind: str, name: str) -> Refused:
    return Refused(f"unknown filter field of a {kind}: {name}")


def tag_nodes(tags: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"__typename": "Tag", "id": base64.b64encode(f"Tag:{t}".encode()).decode(), "name": t}
        for t in tags
    ]


@dataclass(eq=False)
class Organization:
    """An organization has a display name, and an entity of another name."""

    id: str
    name: str
    orgEntity: Entity = field(init=False)
    coreWeaveOrganizationId: str | None = None
    _advanced_search: bool = False

    def featureFlags(self, rampIDType: str) -> list[Any]:
        return []

    def advancedRegistryFeatures(self) -> dict[str, Any]:
        return {"advancedSearch": self._advanced_search}


@dataclass(eq=False)
class Entity:
    """A team, a person's own space, or the entity of an organization."""

    _world: World
    id: str
    name: str
    entityType: str
    organization: Organization | None = None
    user: dict[str, Any] | None = None
    xxhashDigestsEnabled: bool = False

    def isTeam(self) -> bool:
        return self.entityType == "team"

    def project(self, name: str | None = None) -> Project | None:
        return self._world.project(name=name, entityName=self.name)

    def _registries(self, filters: str | None, order: str | None = None) -> list[Project]:
        registries = [
            p
            for p in self._world.projects.values()
            if p.entity is self and p.name.startswith(REGISTRY_PREFIX)
        ]
        return chosen(registries, filters, order, see)

    def projects(
        self,
        filters: str | None = None,
        order: str | None = None,
        first: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        return connection(self._registries(filters, order), first, after)

    def _collections(
        self, project_filters: str | None, filters: str | None, order: str | None
    ) -> list[Any]:
        inside = self._registries(project_filters, "name")
        found = [c for c in self._world.collections.values() if c.project in inside]
        return chosen(found, filters, order, see)

    def artifactCollections(
        self,
        projectFilters: str | None = None,
        filters: str | None = None,
        collectionTypes: Sequence[str] = ("PORTFOLIO",),
        order: str | None = None,
        first: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        found = self._collections(projectFilters, filters, order)
        return connection([c for c in found if c._kind in collectionTypes], first, after)

    def artifactMemberships(
        self,
        projectFilters: str | None = None,
        collectionFilters: str | None = None,
        filters: str | None = None,
        order: str | None = None,
        first: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        inside = set(self._collections(projectFilters, collectionFilters, "name"))
        indexed = self._world.now() - self._world.options.search_lag_s
        members = [
            m
            for m in self._world.memberships.values()
            if m.artifactCollection in inside and m._created <= indexed
        ]
        return connection(chosen(members, filters, order, see), first, after)


@dataclass(eq=False)
class Project:
    """A project; a registry is one of the organization's entity with a prefixed name."""

    _world: World
    _number: int
    name: str
    entity: Entity
    _created: float
    description: str | None = None
    access: str = "PRIVATE"
    allowAllArtifactTypesInRegistry: bool = True
    isBenchmark: bool = False
    views: str = "{}"
    _updated: float = 0.0
    _types: list[str] = field(default_factory=list)

    def id(self) -> str:
        return identifier("Project", self._number)

    def internalId(self) -> str:
        return identifier("ProjectInternalId", self._number)

    def entityName(self) -> str:
        return self.entity.name

    def createdAt(self) -> str:
        return stamp(self._created)

    def updatedAt(self) -> str:
        return stamp(self._updated or self._created)

    def readOnly(self) -> bool:
        return self._world.is_read_only(self)

    def user(self) -> dict[str, Any]:
        return self._world.viewer()

    def _see(self, name: str) -> list[Any]:
        match name:
            case "id" | "project_id":
                return [self._number]
            case "name" | "description":
                return [getattr(self, name)]
            case "entity_id":
                return [self.entity.id]
            case "created_at":
                return [self.createdAt()]
            case "updated_at":
                return [self.updatedAt()]
        raise no_field("registry", name)

    def _all(self, type_name: str | None = None) -> list[Any]:
        mine = [c for c in self._world.collections.values() if c.project is self]
        return [c for c in mine if type_name in (None, c._type)]

    def _find(self, name: str) -> Any:
        return self._world.collections.get((self._number, name))

    def artifactTypes(
        self, includeAll: bool = False, first: int | None = None, after: str | None = None
    ) -> dict[str, Any]:
        names = sorted({*self._types, *(c._type for c in self._all())})
        return connection([ArtifactType(self, n) for n in names], first, after)

    def artifactType(self, name: str) -> ArtifactType | None:
        return ArtifactType(self, name) if name in self._types or self._all(name) else None

    def artifactCollections(
        self,
        filters: str | None = None,
        order: str | None = None,
        first: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        return connection(chosen(self._all(), filters, order, see), first, after)

    def artifactCollection(self, name: str) -> Any:
        return self._find(name)

    def artifactCollectionMembership(self, name: str) -> ArtifactCollectionMembership | None:
        collection, _, alias = name.partition(":")
        found = self._find(collection)
        return found._member(alias or LATEST) if found else None

    def artifact(self, name: str) -> Artifact | None:
        member = self.artifactCollectionMembership(name)
        return member.artifact if member else None

    def run(self, name: str) -> Run | None:
        return self._world.runs.get((self._number, name))

    def bucket(self, name: str, missingOk: bool = False) -> Run | None:
        found = self.run(name)
        if found is None and not missingOk:
            raise Refused(f"run {name} not found", 404)
        return found

    def _runs(self, filters: str | None, order: str | None) -> list[Any]:
        mine = [run for run in self._world.runs.values() if run.project is self]
        return chosen(mine, filters, order, see)

    def runCount(self, filters: str | None = None) -> int:
        return len(self._runs(filters, None))

    def runs(
        self,
        filters: str | None = None,
        order: str | None = None,
        first: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        return connection(self._runs(filters, order), first, after)


@dataclass(eq=False)
class ArtifactType:
    """The kind of a collection, within a project."""

    _project: Project
    name: str
    description: str | None = None

    def id(self) -> str:
        return base64.b64encode(f"ArtifactType:{self._project.name}:{self.name}".encode()).decode()

    def createdAt(self) -> str:
        return self._project.createdAt()

    def artifactCollection(self, name: str) -> Any:
        found = self._project._find(name)
        return found if found and found._type == self.name else None

    def artifactCollections(
        self,
        filters: str | None = None,
        order: str | None = None,
        first: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        return connection(chosen(self._project._all(self.name), filters, order, see), first, after)


@dataclass(eq=False)
class Collection:
    """A name with versions that count from 0, and aliases that each stand for one of them."""

    _world: World
    _number: int
    name: str
    project: Project
    _type: str
    _created: float
    description: str | None = None
    state: str = "READY"
    digestAlgorithm: str = "MANIFEST_MD5"
    _kind = ""
    _updated: float = 0.0
    _tags: list[str] = field(default_factory=list)
    _members: list[ArtifactCollectionMembership] = field(default_factory=list)
    _next: int = 0

    def id(self) -> str:
        return identifier("ArtifactCollection", self._number)

    def createdAt(self) -> str:
        return stamp(self._created)

    def updatedAt(self) -> str:
        return stamp(self._updated or self._created)

    def defaultArtifactType(self) -> ArtifactType:
        return ArtifactType(self.project, self._type)

    def tags(self) -> dict[str, Any]:
        return connection(tag_nodes(self._tags), 1000, None)

    def latestArtifact(self) -> Artifact | None:
        member = self._member(LATEST)
        return member.artifact if member else None

    def artifactMembership(self, aliasName: str) -> ArtifactCollectionMembership | None:
        return self._member(aliasName)

    def artifacts(
        self,
        filters: str | None = None,
        order: str | None = None,
        first: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        members = chosen(self._members, filters, order, see)
        page = connection(members, first, after)
        for edge in page["edges"]:
            edge["node"] = edge["node"].artifact
        return page

    def aliases(self, first: int | None = None, after: str | None = None) -> dict[str, Any]:
        nodes = [node for member in self._members for node in member.aliases()]
        return connection(nodes, first, after)

    def _see(self, name: str) -> list[Any]:
        match name:
            case "id" | "artifact_collection_id":
                return [self._number, self.id()]
            case "name" | "description":
                return [getattr(self, name)]
            case "created_at":
                return [self.createdAt()]
            case "updated_at":
                return [self.updatedAt()]
            case "tag" | "tags":
                return list(self._tags)
        raise no_field("collection", name)

    def _member(self, alias: str) -> ArtifactCollectionMembership | None:
        """By an alias, else by the number of a version."""
        for member in self._members:
            if alias in member._aliases:
                return member
        return next((m for m in self._members if alias == f"v{m.versionIndex}"), None)

    def _name(self, member: ArtifactCollectionMembership, alias: str) -> None:
        """Gives an alias to one version and takes it from the others."""
        for other in self._members:
            if other is not member and alias in other._aliases:
                other._aliases.remove(alias)
        if alias not in member._aliases:
            member._aliases.append(alias)

    def _enter(self, artifact: Artifact, aliases: Sequence[str]) -> ArtifactCollectionMembership:
        """Makes an artifact the collection's next version."""
        member = ArtifactCollectionMembership(
            self._world.number(), self._next, self, artifact, self._world.now()
        )
        self._next += 1
        self._members.append(member)
        artifact._members.append(member)
        self._world.memberships[member._number] = member
        for alias in (*aliases, LATEST):
            self._name(member, alias)
        self._updated = self._world.now()
        return member

    def _leave(self, member: ArtifactCollectionMembership) -> None:
        """Removes a version; its number isn't given again."""
        self._members.remove(member)
        member.artifact._members.remove(member)
        del self._world.memberships[member._number]
        if LATEST in member._aliases and self._members:
            self._name(self._members[-1], LATEST)
        self._updated = self._world.now()


class ArtifactSequence(Collection):
    """The versions that runs logged under one name."""

    _kind = "SEQUENCE"


class ArtifactPortfolio(Collection):
    """A collection of links, as a registry has them."""

    _kind = "PORTFOLIO"


@dataclass(eq=False)
class ArtifactCollectionMembership:
    """An artifact as one version of one collection."""

    _number: int
    versionIndex: int
    artifactCollection: Collection
    artifact: Artifact
    _created: float
    _aliases: list[str] = field(default_factory=list)

    def id(self) -> str:
        return identifier("ArtifactCollectionMembership", self._number)

    def createdAt(self) -> str:
        return stamp(self._created)

    def aliases(self) -> list[dict[str, Any]]:
        return [
            {
                "__typename": "ArtifactAlias",
                "id": identifier(f"ArtifactAlias:{alias}", self._number),
                "alias": alias,
                "artifactCollection": self.artifactCollection,
            }
            for alias in self._aliases
        ]

    def files(
        self, names: list[str] | None = None, first: int | None = None, after: str | None = None
    ) -> dict[str, Any]:
        return self.artifact.files(names=names, first=first, after=after)

    def _see(self, name: str) -> list[Any]:
        match name:
            case "id" | "artifact_id":
                return [self.artifact._number, self.artifact.id()]
            case "version" | "version_index":
                return [self.versionIndex, f"v{self.versionIndex}"]
            case "alias" | "aliases":
                return [*self._aliases, f"v{self.versionIndex}"]
            case "acm_created_at" | "linked_at":
                return [self.createdAt()]
        return self.artifact._see(name)


@dataclass(eq=False)
class Artifact:
    """Content that never changes, with metadata and tags that may."""

    _world: World
    _number: int
    artifactSequence: ArtifactSequence
    digest: str
    _created: float
    description: str | None = None
    metadata: str | None = None
    ttlDurationSeconds: int = -2
    ttlIsInherited: bool = True
    historyStep: int | None = None
    state: str = "PENDING"
    digestAlgorithm: str = "MANIFEST_MD5"
    commitHash: str | None = None
    size: int = 0
    fileCount: int = 0
    currentManifest: ArtifactManifest | None = None
    _run: Run | None = None
    _used_by: list[Run] = field(default_factory=list)
    _updated: float = 0.0
    _tags: list[str] = field(default_factory=list)
    _wanted_aliases: list[str] = field(default_factory=list)
    _members: list[ArtifactCollectionMembership] = field(default_factory=list)

    def id(self) -> str:
        return identifier("Artifact", self._number)

    def createdAt(self) -> str:
        return stamp(self._created)

    def updatedAt(self) -> str:
        return stamp(self._updated or self._created)

    def artifactType(self) -> ArtifactType:
        return self.artifactSequence.defaultArtifactType()

    def versionIndex(self) -> int | None:
        own = [m for m in self._members if m.artifactCollection is self.artifactSequence]
        return own[0].versionIndex if own else None

    def tags(self) -> list[dict[str, Any]]:
        return tag_nodes(self._tags)

    def aliases(self) -> list[dict[str, Any]]:
        return [node for member in self._members for node in member.aliases()]

    def artifactMemberships(self) -> dict[str, Any]:
        return connection(self._members, 1000, None)

    def createdBy(self) -> Run | None:
        return self._run

    def usedBy(self) -> dict[str, Any]:
        return connection(self._used_by, 1000, None)

    def files(
        self, names: list[str] | None = None, first: int | None = None, after: str | None = None
    ) -> dict[str, Any]:
        manifest = self.currentManifest
        entries = manifest._entries() if manifest else {}
        wanted = [n for n in sorted(entries) if names is None or n in names]
        owned = [n for n in wanted if not entries[n].get("ref")]
        return connection([File(self, n, entries[n]) for n in owned], first, after)

    def _see(self, name: str) -> list[Any]:
        root, *path = name.split(".")
        match root:
            case "metadata" | "artifact_metadata":
                return in_metadata(self.metadata, path)
            case "tag" | "tags":
                return list(self._tags)
            case "state" | "digest" | "description":
                return [getattr(self, root)]
            case "artifact_size" | "size":
                return [self.size]
            case "created_at" | "artifact_created_at":
                return [self.createdAt()]
            case "updated_at":
                return [self.updatedAt()]
        raise no_field("version", name)


@dataclass(eq=False)
class ArtifactManifest:
    """The list of an artifact's files, itself a file that the SDK uploads."""

    _artifact: Artifact
    _number: int
    _digest: str = ""

    def id(self) -> str:
        return identifier("ArtifactManifest", self._number)

    def file(self) -> dict[str, Any]:
        url = self._artifact._world.url("manifest", str(self._number))
        headers = [f"Content-MD5:{self._digest}", "Content-Type:application/json"]
        return {
            "__typename": "File",
            "id": identifier("ManifestFile", self._number),
            "uploadUrl": url,
            "uploadHeaders": headers,
            "directUrl": url,
        }

    def _entries(self) -> dict[str, dict[str, Any]]:
        path = self._artifact._world.storage.path("manifest", str(self._number))
        return json.loads(path.read_bytes())["contents"] if path.is_file() else {}


@dataclass(eq=False)
class File:
    """One file of an artifact, by its name there."""

    _artifact: Artifact
    name: str
    _entry: dict[str, Any]
    mimetype: str | None = None

    def id(self) -> str:
        return base64.b64encode(f"File:{self._artifact._number}:{self.name}".encode()).decode()

    def displayName(self) -> str:
        return self.name

    def _hex(self) -> str:
        return hexadecimal(self._entry["digest"])

    def directUrl(self) -> str:
        return self._artifact._world.url("blob", self._hex())

    url = directUrl

    def sizeBytes(self) -> int:
        return int(self._entry["size"])

    def storagePath(self) -> str:
        return f"blob/{self._hex()}"

    def updatedAt(self) -> str:
        return self._artifact.createdAt()

    def digest(self) -> str:
        return base64_md5(self._hex())

    md5 = digest


@dataclass(eq=False)
class Run:
    """One run of a project."""

    _world: World
    _number: int
    name: str
    project: Project
    _created: float
    displayName: str = "unnamed"
    description: str | None = None
    notes: str | None = None
    config: str = "{}"
    summaryMetrics: str = "{}"
    systemMetrics: str = "{}"
    group: str | None = None
    jobType: str | None = None
    commit: str | None = None
    sweepName: str | None = None
    state: str = "running"
    stopped: bool = False
    readOnly: bool = False
    tags: list[str] = field(default_factory=list)
    historyLineCount: int = 0
    logLineCount: int = 0
    eventsLineCount: int = 0
    historyTail: str = "[]"
    eventsTail: str = "[]"
    _inputs: list[Artifact] = field(default_factory=list)

    def id(self) -> str:
        return identifier("Run", self._number)

    def projectId(self) -> int:
        return self.project._number

    def createdAt(self) -> str:
        return stamp(self._created)

    heartbeatAt = createdAt

    def user(self) -> dict[str, Any]:
        return self._world.viewer()

    def historyKeys(self) -> dict[str, Any] | None:
        return None

    def _see(self, name: str) -> list[Any]:
        match name:
            case "name" | "state" | "group" | "jobType" | "displayName":
                return [getattr(self, name)]
            case "tags":
                return list(self.tags)
            case "created_at" | "createdAt":
                return [self.createdAt()]
        raise no_field("run", name)

    def wandbConfig(self, keys: list[str] | None = None) -> str:
        return json.dumps({"t": 1})

    def outputArtifacts(self, first: int | None = None, after: str | None = None) -> dict[str, Any]:
        logged = [a for a in self._world.artifacts.values() if a._run is self and is_there(a)]
        return connection(logged, first, after)

    def inputArtifacts(self, first: int | None = None, after: str | None = None) -> dict[str, Any]:
        return connection(self._inputs, first, after)


def is_there(artifact: Artifact) -> bool:
    return artifact.state == "COMMITTED"
