"""Mutations of registries, links and aliases.

Each method is a mutation and takes its input. It checks all before it changes anything, and twice
ends in the same state as once: an SDK sends it again when the reply got lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.places import REGISTRY_PREFIX, Project
from tests.wandb_server.versions import (
    ArtifactPortfolio,
)

if TYPE_CHECKING:
    from tests.wandb_server.world import World

Reply = dict[str, Any]
Aliases = list[dict[str, str]] | None


class Links:
    """Registries, links, aliases and tags."""

    def writable(self: World, project: Project) -> None:
        if self.is_read_only(project):
            name = f"{project.entity.name}/{project.name}"
            raise Refused(f"permission denied: {name} is read-only", 403, "PERMISSION_ERROR")

    def linkArtifact(
        self: World,
        artifactPortfolioName: str,
        entityName: str,
        projectName: str,
        artifactID: str | None = None,
        clientID: str | None = None,
        aliases: Aliases = None,
    ) -> Reply:
        project = self.project(name=projectName, entityName=entityName)
        if project is None:
            kind = "registry" if projectName.startswith(REGISTRY_PREFIX) else "project"
            raise Refused(f"{kind} {entityName}/{projectName} not found", 404, "NOT_FOUND")
        self.writable(project)
        draft = self.by_client.get(clientID or "")
        artifact = self.wanted(artifactID or (draft.id() if draft else ""), state="COMMITTED")
        type_name = artifact.artifactSequence._type
        if not project.allowAllArtifactTypesInRegistry and type_name not in project._types:
            raise Refused(f"artifact type {type_name} is not allowed in {projectName}")
        portfolio = project._find(artifactPortfolioName)
        if portfolio is None:
            portfolio = self.made_collection(
                ArtifactPortfolio, project, artifactPortfolioName, type_name
            )
        elif portfolio._kind != "PORTFOLIO":
            raise Refused(
                f"{artifactPortfolioName} is a sequence of {projectName}, not a portfolio"
            )
        elif portfolio._type != type_name:
            raise Refused(
                f"collection {artifactPortfolioName} has type {portfolio._type}, not {type_name}"
            )
        wanted = [a["alias"] for a in aliases or []]
        member = next((m for m in portfolio._members if m.artifact is artifact), None)
        if member is None:
            member = portfolio._enter(artifact, wanted)
        else:
            self.name_in(portfolio, artifact, wanted)
        return {
            "__typename": "LinkArtifactPayload",
            "versionIndex": member.versionIndex,
            "artifactMembership": member,
        }

    def unlinkArtifact(self: World, artifactID: str, artifactPortfolioID: str) -> Reply:
        artifact = self.wanted(artifactID)
        member = next(
            (m for m in artifact._members if m.artifactCollection.id() == artifactPortfolioID), None
        )
        if member is None or member.artifactCollection._kind != "PORTFOLIO":
            raise Refused(f"artifact {artifactID} is not linked to {artifactPortfolioID}")
        self.writable(member.artifactCollection.project)
        member.artifactCollection._leave(member)
        return {"__typename": "UnlinkArtifactPayload", "success": True}

    def upsertModel(
        self: World,
        entityName: str | None = None,
        name: str | None = None,
        id: str | None = None,
        description: str | None = None,
        access: str | None = None,
        allowAllArtifactTypesInRegistry: bool | None = None,
        artifactTypes: list[dict[str, str]] | None = None,
    ) -> Reply:
        key = (entityName or "team", name or "uncategorized")
        if key[0] not in self.entities:
            raise Refused(f"entity {key[0]} not found", 404, "NOT_FOUND")
        found = self.projects.get(key)
        if found:
            self.writable(found)
        project = found or Project(self, self.number(), key[1], self.entities[key[0]], self.now())
        self.projects[key] = project
        if description is not None:
            project.description = description
        project.access = access or project.access
        if allowAllArtifactTypesInRegistry is not None:
            project.allowAllArtifactTypesInRegistry = allowAllArtifactTypesInRegistry
        names = [t["name"] for t in artifactTypes or []]
        project._types.extend(n for n in names if n not in project._types)
        project._updated = self.now()
        return {
            "__typename": "UpsertModelPayload",
            "inserted": found is None,
            "project": project,
            "model": project,
        }

    def renameProject(
        self: World, entityName: str, oldProjectName: str, newProjectName: str
    ) -> Reply:
        project = self.project(name=oldProjectName, entityName=entityName)
        if project is None or (entityName, newProjectName) in self.projects:
            raise Refused(f"cannot rename {entityName}/{oldProjectName} to {newProjectName}")
        self.writable(project)
        del self.projects[entityName, oldProjectName]
        project.name = newProjectName
        self.projects[entityName, newProjectName] = project
        return {"__typename": "RenameProjectPayload", "inserted": False, "project": project}

    def deleteModel(self: World, id: str) -> Reply:
        project = next((p for p in self.projects.values() if p.id() == id), None)
        if project is None:
            raise Refused(f"project {id} not found", 404, "NOT_FOUND")
        self.writable(project)
        for collection in project._all():
            self.drop(collection)
        del self.projects[project.entity.name, project.name]
        return {"__typename": "DeleteModelPayload", "success": True}

    def addAliases(self: World, artifactID: str, aliases: list[dict[str, str]]) -> Reply:
        for member, alias in self.addressed(artifactID, aliases):
            member.artifactCollection._name(member, alias)
        return {"__typename": "AddAliasesPayload", "success": True}

    def deleteAliases(self: World, artifactID: str, aliases: list[dict[str, str]]) -> Reply:
        for member, alias in self.addressed(artifactID, aliases):
            if alias in member._aliases:
                member._aliases.remove(alias)
        return {"__typename": "DeleteAliasesPayload", "success": True}

    def addressed(self: World, artifactID: str, aliases: list[dict[str, str]]) -> list[Any]:
        """The membership that each alias is about; all are checked before the first is used."""
        artifact = self.wanted(artifactID)
        found = []
        for a in aliases:
            project = self.project(name=a["projectName"], entityName=a["entityName"])
            collection = project._find(a["artifactCollectionName"]) if project else None
            member = next(
                (m for m in artifact._members if m.artifactCollection is collection), None
            )
            if project is None or member is None:
                raise Refused(f"artifact {artifactID} is not in {a['artifactCollectionName']}")
            self.writable(project)
            found.append((member, a["alias"]))
        return found
