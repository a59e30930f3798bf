"""Where things are: organizations, entities, projects (a registry is one), types of artifacts.

Public attributes and methods are the GraphQL fields of the type, with the server's names and
arguments; names with an underscore are the server's own.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.pages import chosen, connection, identifier, no_field, see, stamp

if TYPE_CHECKING:
    from tests.wandb_server.runs import Run
    from tests.wandb_server.versions import Artifact, ArtifactCollectionMembership
    from tests.wandb_server.world import World

REGISTRY_PREFIX = "wandb-registry-"


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
        return found._member(alias or "latest") if found else None

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
