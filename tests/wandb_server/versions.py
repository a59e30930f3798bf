"""What is kept: collections, the artifacts that are their versions, and the artifacts' files.

Public attributes and methods are the GraphQL fields of the type, with the server's names and
arguments; names with an underscore are the server's own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.wandb_server.filters import in_metadata
from tests.wandb_server.pages import (
    chosen,
    connection,
    identifier,
    no_field,
    see,
    stamp,
    tag_nodes,
)
from tests.wandb_server.places import ArtifactType, Project
from tests.wandb_server.storage import base64_md5, hexadecimal

if TYPE_CHECKING:
    from tests.wandb_server.runs import Run
    from tests.wandb_server.world import World

LATEST = "latest"


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


def is_there(artifact: Artifact) -> bool:
    return artifact.state == "COMMITTED"
