"""Mutations of metadata, tags and descriptions; deletions.

Each method is a mutation and takes its input. It checks all before it changes anything, and twice
ends in the same state as once: an SDK sends it again when the reply got lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.pages import tag_nodes
from tests.wandb_server.versions import (
    Collection,
)

if TYPE_CHECKING:
    from tests.wandb_server.world import World

Reply = dict[str, Any]
Aliases = list[dict[str, str]] | None


class Edits:
    """Changes of metadata, tags and descriptions; deletion."""

    def updateArtifact(
        self: World,
        artifactID: str,
        description: str | None = None,
        metadata: str | None = None,
        tagsToAdd: list[dict[str, str]] | None = None,
        tagsToDelete: list[dict[str, str]] | None = None,
        ttlDurationSeconds: int | None = None,
        aliases: Aliases = None,
        labels: str | None = None,
    ) -> Reply:
        artifact = self.wanted(artifactID)
        sequence = artifact.artifactSequence
        self.writable(sequence.project)
        if description is not None:
            artifact.description = description
        if metadata is not None:
            artifact.metadata = metadata
        gone = {t["tagName"] for t in tagsToDelete or []}
        added = [t["tagName"] for t in tagsToAdd or []]
        artifact._tags = list(
            dict.fromkeys([*(t for t in artifact._tags if t not in gone), *added])
        )
        if ttlDurationSeconds is not None:
            artifact.ttlDurationSeconds, artifact.ttlIsInherited = ttlDurationSeconds, False
        if aliases is not None:
            member = next(m for m in sequence._members if m.artifact is artifact)
            member._aliases.clear()
            self.name_in(sequence, artifact, [a["alias"] for a in aliases])
        artifact._updated = self.now()
        return {"__typename": "UpdateArtifactPayload", "artifact": artifact}

    def deleteArtifact(self: World, artifactID: str, deleteAliases: bool = False) -> Reply:
        artifact = self.wanted(artifactID)
        self.writable(artifact.artifactSequence.project)
        names = sorted({a for m in artifact._members for a in m._aliases})
        if names and not deleteAliases:
            raise Refused(f"cannot delete artifact {artifactID}: it has aliases {names}")
        for member in list(artifact._members):
            member.artifactCollection._leave(member)
        artifact.state = "DELETED"
        return {"__typename": "DeleteArtifactPayload", "artifact": artifact}

    def collection_of(self: World, id: str | None) -> Collection:
        found = self.artifactCollection(id or "")
        if found is None:
            raise Refused(f"collection {id} not found", 404, "NOT_FOUND")
        self.writable(found.project)
        return found

    def drop(self: World, collection: Collection) -> None:
        """Deletes a collection; of a sequence also its artifacts, wherever they are linked."""
        for member in list(collection._members):
            own = collection._kind == "SEQUENCE"
            for other in list(member.artifact._members) if own else [member]:
                other.artifactCollection._leave(other)
            if own:
                member.artifact.state = "DELETED"
        collection.state = "DELETED"
        del self.collections[collection.project._number, collection.name]

    def deleteArtifactSequence(self: World, artifactSequenceID: str) -> Reply:
        collection = self.collection_of(artifactSequenceID)
        self.drop(collection)
        return {"__typename": "DeletePayload", "artifactCollection": collection}

    def deleteArtifactPortfolio(self: World, artifactPortfolioID: str) -> Reply:
        return self.deleteArtifactSequence(artifactPortfolioID)

    def updateArtifactPortfolio(
        self: World,
        artifactPortfolioID: str | None = None,
        artifactSequenceID: str | None = None,
        name: str | None = None,
        description: str | None = None,
    ) -> Reply:
        collection = self.collection_of(artifactPortfolioID or artifactSequenceID)
        if name and name != collection.name:
            if collection.project._find(name):
                raise Refused(f"collection {name} already exists")
            del self.collections[collection.project._number, collection.name]
            collection.name = name
            self.collections[collection.project._number, name] = collection
        if description is not None:
            collection.description = description
        collection._updated = self.now()
        return {"__typename": "UpdatePayload", "artifactCollection": collection}

    updateArtifactSequence = updateArtifactPortfolio

    def moveArtifactSequence(
        self: World, artifactSequenceID: str, destinationArtifactTypeName: str
    ) -> Reply:
        collection = self.collection_of(artifactSequenceID)
        collection._type = destinationArtifactTypeName
        return {"__typename": "MovePayload", "artifactCollection": collection}

    def tagged(self: World, entity: str, project: str, name: str) -> Collection:
        holder = self.project(name=project, entityName=entity)
        found = holder._find(name) if holder else None
        if holder is None or found is None:
            raise Refused(f"collection {entity}/{project}/{name} not found", 404, "NOT_FOUND")
        self.writable(holder)
        return found

    def createArtifactCollectionTagAssignments(
        self: World,
        entityName: str,
        projectName: str,
        artifactCollectionName: str,
        tags: list[dict[str, str]],
    ) -> Reply:
        if len(tags) > 20:
            raise Refused(f"{len(tags)} tags in one call, at most 20")
        found = self.tagged(entityName, projectName, artifactCollectionName)
        found._tags = list(dict.fromkeys([*found._tags, *(t["tagName"] for t in tags)]))
        found._updated = self.now()
        return {"__typename": "TagPayload", "tags": tag_nodes(found._tags)}

    def deleteArtifactCollectionTagAssignments(
        self: World,
        entityName: str,
        projectName: str,
        artifactCollectionName: str,
        tags: list[dict[str, str]],
    ) -> Reply:
        found = self.tagged(entityName, projectName, artifactCollectionName)
        gone = {t["tagName"] for t in tags}
        found._tags = [t for t in found._tags if t not in gone]
        return {"__typename": "TagPayload", "success": True}
