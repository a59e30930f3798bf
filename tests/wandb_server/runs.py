"""Runs: what logged an artifact, and what used it.

Public attributes and methods are the GraphQL fields of the type, with the server's names and
arguments; names with an underscore are the server's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.wandb_server.pages import connection, identifier, no_field, stamp
from tests.wandb_server.places import Project
from tests.wandb_server.versions import Artifact, is_there

if TYPE_CHECKING:
    from tests.wandb_server.world import World


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
