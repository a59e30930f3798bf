"""Mutations that make a version of a draft.

Each method is a mutation and takes its input. It checks all before it changes anything, and twice
ends in the same state as once: an SDK sends it again when the reply got lost.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.places import Project
from tests.wandb_server.storage import BadBytes, base64_md5, hexadecimal
from tests.wandb_server.versions import (
    Artifact,
    ArtifactManifest,
    ArtifactSequence,
    Collection,
    is_there,
)

if TYPE_CHECKING:
    from tests.wandb_server.world import World

Reply = dict[str, Any]
Aliases = list[dict[str, str]] | None


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
            "uploadUrl": self.url("blob", blob) if missing else None,
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
