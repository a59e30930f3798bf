"""What changes the stand-in server's state; every method is a GraphQL mutation, taking its input.

Each checks all before it changes anything. An SDK sends a mutation again when the reply got lost:
doing it twice ends in the same state.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.objects import (
    REGISTRY_PREFIX,
    Artifact,
    ArtifactManifest,
    ArtifactPortfolio,
    ArtifactSequence,
    Collection,
    Project,
    Run,
    is_there,
    tag_nodes,
)
from tests.wandb_server.storage import BadBytes, base64_md5, hexadecimal

if TYPE_CHECKING:
    from tests.wandb_server.world import World

Reply = dict[str, Any]
Aliases = list[dict[str, str]] | None


class Runs:
    """The life of a run."""

    def upsertBucket(
        self: World,
        id: str | None = None,
        name: str | None = None,
        modelName: str | None = None,
        entityName: str | None = None,
        groupName: str | None = None,
        description: str | None = None,
        displayName: str | None = None,
        notes: str | None = None,
        config: str | None = None,
        commit: str | None = None,
        host: str | None = None,
        debug: bool | None = None,
        jobType: str | None = None,
        jobProgram: str | None = None,
        jobRepo: str | None = None,
        state: str | None = None,
        sweep: str | None = None,
        tags: list[str] | None = None,
        summaryMetrics: str | None = None,
    ) -> Reply:
        run = next((r for r in self.runs.values() if r.id() == id), None) if id else None
        inserted = False
        if run is None:
            project = self.made_project(entityName, modelName)
            run = self.runs.get((project._number, str(name)))
            if run is None:
                inserted = True
                number = self.number()
                run = Run(self, number, name or f"run{number}", project, self.now())
                self.runs[project._number, run.name] = run
        self.writable(run.project)
        given = {
            "displayName": displayName,
            "description": description,
            "notes": notes,
            "config": config,
            "group": groupName,
            "commit": commit,
            "jobType": jobType,
            "state": state,
            "tags": tags,
            "summaryMetrics": summaryMetrics,
        }
        for key, value in given.items():
            if value is not None:
                setattr(run, key, value)
        return {"__typename": "UpsertBucketPayload", "bucket": run, "inserted": inserted}

    def made_project(self: World, entity: str | None, name: str | None) -> Project:
        """The project of a run, new if need be."""
        found = self.project(name=name, entityName=entity)
        if found:
            return found
        owner = self.entities.get(entity or "team")
        if owner is None or owner.entityType == "organization":
            raise Refused(f"entity {entity} not found during upsertBucket", 404, "NOT_FOUND")
        made = Project(self, self.number(), name or "uncategorized", owner, self.now())
        self.projects[owner.name, made.name] = made
        return made

    def createRunFiles(
        self: World, entityName: str, projectName: str, runName: str, files: list[str]
    ) -> Reply:
        run = self.run_of(entityName, projectName, runName)
        return {
            "__typename": "CreateRunFilesPayload",
            "runID": run.id(),
            "uploadHeaders": [],
            "files": [
                {
                    "__typename": "File",
                    "name": name,
                    "uploadUrl": self.url("run", f"{run.name}~{name.replace('/', '~')}"),
                }
                for name in files
            ],
        }

    def run_of(self: World, entity: str, project: str, run: str) -> Run:
        holder = self.project(name=project, entityName=entity)
        found = holder.run(run) if holder else None
        if found is None:
            raise Refused(f"run {entity}/{project}/{run} not found", 404, "NOT_FOUND")
        return found

    def useArtifact(
        self: World,
        entityName: str,
        projectName: str,
        runName: str,
        artifactID: str,
        usedAs: str | None = None,
        artifactEntityName: str | None = None,
        artifactProjectName: str | None = None,
    ) -> Reply:
        run = self.run_of(entityName, projectName, runName)
        artifact = self.wanted(artifactID)
        self.writable(run.project)
        if run not in artifact._used_by:
            artifact._used_by.append(run)
            run._inputs.append(artifact)
        return {"__typename": "UseArtifactPayload", "artifact": artifact}


class Uploads:
    """From a draft to a version."""

    def createArtifact(
        self: World,
        entityName: str,
        projectName: str,
        artifactTypeName: str,
        digest: str,
        runName: str | None = None,
        artifactCollectionName: str | None = None,
        artifactCollectionNames: list[str] | None = None,
        digestAlgorithm: str = "MANIFEST_MD5",
        description: str | None = None,
        aliases: Aliases = None,
        tags: list[dict[str, str]] | None = None,
        metadata: str | None = None,
        ttlDurationSeconds: int | None = None,
        historyStep: int | None = None,
        enableDigestDeduplication: bool = False,
        clientID: str | None = None,
        sequenceClientID: str | None = None,
        storageRegion: str | None = None,
    ) -> Reply:
        project = self.project(name=projectName, entityName=entityName)
        if project is None:
            raise Refused(f"project {entityName}/{projectName} not found", 404, "NOT_FOUND")
        self.writable(project)
        name = artifactCollectionName or (artifactCollectionNames or [""])[0]
        if not re.fullmatch(r"[\w.\-]{1,128}", name):
            raise Refused(f"invalid artifact name: {name!r}")
        found = project._find(name)
        if found and (found._type != artifactTypeName or found._kind != "SEQUENCE"):
            raise Refused(f"artifact collection {name} already exists with type {found._type}")
        sequence = found or self.made_collection(ArtifactSequence, project, name, artifactTypeName)
        wanted = [a["alias"] for a in aliases or []]
        artifact = self.by_client.get(clientID or "")
        if artifact is None and enableDigestDeduplication:
            artifact = next(
                (m.artifact for m in sequence._members if m.artifact.digest == digest), None
            )
        if artifact is None:
            artifact = Artifact(
                self,
                self.number(),
                sequence,
                digest,
                self.now(),
                description=description,
                metadata=metadata,
                historyStep=historyStep,
                digestAlgorithm=digestAlgorithm,
                _run=project.run(runName) if runName else None,
                _tags=[t["tagName"] for t in tags or []],
                _wanted_aliases=wanted,
            )
            if ttlDurationSeconds:
                artifact.ttlDurationSeconds, artifact.ttlIsInherited = ttlDurationSeconds, False
            self.artifacts[artifact.id()] = artifact
        elif is_there(artifact):
            self.name_in(sequence, artifact, wanted)
        if clientID:
            self.by_client[clientID] = artifact
        return {"__typename": "CreateArtifactPayload", "artifact": artifact}

    def name_in(
        self: World, collection: Collection, artifact: Artifact, aliases: list[str]
    ) -> None:
        member = next(m for m in collection._members if m.artifact is artifact)
        for alias in aliases:
            collection._name(member, alias)

    def made_collection(
        self: World, kind: type[Collection], project: Project, name: str, type_name: str
    ) -> Any:
        made = kind(self, self.number(), name, project, type_name, self.now())
        self.collections[project._number, name] = made
        return made

    def createArtifactManifest(
        self: World,
        artifactID: str,
        name: str,
        digest: str,
        entityName: str,
        projectName: str,
        runName: str,
        type: str,
        baseArtifactID: str | None = None,
    ) -> Reply:
        artifact = self.wanted(artifactID, state="PENDING")
        manifest = artifact.currentManifest
        if manifest is None:
            manifest = artifact.currentManifest = ArtifactManifest(artifact, self.number())
        manifest._digest = digest
        return {"__typename": "CreateArtifactManifestPayload", "artifactManifest": manifest}

    def createArtifactFiles(
        self: World,
        artifactFiles: list[dict[str, Any]],
        storageLayout: str | None = None,
        digestAlgorithm: str | None = None,
    ) -> Reply:
        edges = [{"__typename": "Edge", "node": self.upload_of(f)} for f in artifactFiles]
        return {
            "__typename": "CreateArtifactFilesPayload",
            "files": {"__typename": "FileConnection", "edges": edges},
        }

    def upload_of(self: World, file: dict[str, Any]) -> Reply:
        """Where the bytes of one file of a draft go: nowhere, if the server has them."""
        artifact = self.wanted(file["artifactID"])
        blob = hexadecimal(file["md5"])
        missing = not self.storage.has("blob", blob)
        parts = file.get("uploadPartsInput") or []
        reply: Reply = {
            "__typename": "File",
            "storagePath": f"blob/{blob}",
            "uploadUrl": self.url("blob", blob) if missing and not parts else None,
            "uploadHeaders": [
                f"Content-MD5:{base64_md5(blob)}",
                f"Content-Type:{file.get('mimetype') or 'application/octet-stream'}",
            ],
            "uploadMultipartUrls": None,
            "artifact": artifact,
        }
        if missing and parts:
            upload = f"{artifact._number}-{blob}"
            reply["uploadMultipartUrls"] = {
                "__typename": "UploadMultipartUrls",
                "uploadID": upload,
                "uploadUrlParts": [
                    {
                        "__typename": "UploadUrlPart",
                        "partNumber": part["partNumber"],
                        "uploadUrl": self.url("part", f"{upload}.{part['partNumber']}"),
                    }
                    for part in parts
                ],
            }
        return reply

    def completeMultipartUploadArtifact(
        self: World,
        completeMultipartAction: str,
        completedParts: list[dict[str, Any]],
        artifactID: str,
        storagePath: str,
        uploadID: str,
    ) -> Reply:
        self.wanted(artifactID)
        blob = Path(storagePath).name
        for part in completedParts:
            if not re.fullmatch(r'"[0-9a-f]{32}"', part["hexMD5"]):
                raise Refused(f"part {part['partNumber']}: {part['hexMD5']} is no ETag of ours")
        try:
            self.storage.join(uploadID, len(completedParts), blob)
        except BadBytes as damage:
            raise Refused(str(damage)) from damage
        return {"__typename": "CompletePayload", "digest": base64_md5(blob)}

    def commitArtifact(self: World, artifactID: str) -> Reply:
        artifact = self.wanted(artifactID)
        if not is_there(artifact):
            artifact.size, artifact.fileCount = self.checked(artifact)
            artifact.state = "COMMITTED"
            artifact.artifactSequence._enter(artifact, artifact._wanted_aliases)
        return {"__typename": "CommitArtifactPayload", "artifact": artifact}

    def checked(self: World, artifact: Artifact) -> tuple[int, int]:
        """Size and number of files of a draft whose parts are all there and fit its digest."""
        manifest = artifact.currentManifest
        path = self.storage.path("manifest", str(manifest._number)) if manifest else None
        if manifest is None or path is None or not path.is_file():
            raise Refused("the artifact's manifest was not uploaded")
        found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        if base64_md5(found) != manifest._digest:
            raise Refused(f"manifest digest: expected {manifest._digest}, got {base64_md5(found)}")
        entries = manifest._entries()
        for name, entry in entries.items():
            if not entry.get("ref") and not self.storage.has("blob", hexadecimal(entry["digest"])):
                raise Refused(f"file {name} of the artifact was not uploaded")
        lines = "".join(f"{name}:{entries[name]['digest']}\n" for name in sorted(entries))
        whole = hashlib.md5(b"wandb-artifact-manifest-v1\n" + lines.encode(), usedforsecurity=False)
        if whole.hexdigest() != artifact.digest:
            raise Refused(f"artifact digest: expected {artifact.digest}, got {whole.hexdigest()}")
        return sum(int(e.get("size") or 0) for e in entries.values()), len(entries)

    def wanted(self: World, id: str, state: str = "") -> Artifact:
        """An artifact by its id, in a certain state.

        Raises:
            Refused: There is none, or it was deleted, or its state is another.
        """
        found = self.artifacts.get(id)
        if found is None or found.state == "DELETED":
            raise Refused(f"artifact {id} not found", 404, "NOT_FOUND")
        if state and found.state != state:
            raise Refused(f"artifact {id} is {found.state}, not {state}")
        return found


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


class Mutations(Runs, Uploads, Links, Edits):
    """All of them; `World` adds the queries."""
