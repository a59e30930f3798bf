"""Mutations of runs.

Each method is a mutation and takes its input. It checks all before it changes anything, and twice
ends in the same state as once: an SDK sends it again when the reply got lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.places import Project
from tests.wandb_server.runs import Run

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
