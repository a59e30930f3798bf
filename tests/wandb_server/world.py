"""The state of the stand-in server and its queries; the mutations are mixed in.

One lock is held for every operation. What succeeded is written to a journal before the reply goes
out, and a server that starts on the same folder replays it: ids are counted and the clock is in the
journal, so the state comes back equal.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from tests.wandb_server.editing import Edits
from tests.wandb_server.executor import Execution, Refused, is_mutation, name_of, parsed
from tests.wandb_server.linking import Links
from tests.wandb_server.options import FEATURES, LONER, ORG, ORG_ENTITY, TEAM, USER, Options
from tests.wandb_server.pages import connection, identifier
from tests.wandb_server.places import Entity, Organization, Project
from tests.wandb_server.running import Runs
from tests.wandb_server.runs import Run
from tests.wandb_server.storage import Storage
from tests.wandb_server.uploading import Uploads
from tests.wandb_server.versions import Artifact, ArtifactCollectionMembership, Collection


class World(Runs, Uploads, Links, Edits):
    """The root of all queries and mutations."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.options = options
        self.storage = Storage(folder)
        self.journal_path = folder / "journal.jsonl"
        self.base_url = ""
        self.lock = threading.Lock()
        self.clock: float | None = None
        self.counter = 100
        self.role = "write"
        self.projects: dict[tuple[str, str], Project] = {}
        self.collections: dict[tuple[int, str], Collection] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.by_client: dict[str, Artifact] = {}
        self.manifests: dict[tuple[int, str], Any] = {}
        self.memberships: dict[int, ArtifactCollectionMembership] = {}
        self.runs: dict[tuple[int, str], Run] = {}
        self.uploads: dict[str, int] = {}
        self.org = Organization(identifier("Organization", 1), ORG)
        person: dict[str, Any] = {"__typename": "User", "organizations": [self.org]}
        nobody: dict[str, Any] = {"__typename": "User", "organizations": []}
        self.entities = {
            TEAM: Entity(self, identifier("Entity", 1), TEAM, "team", self.org),
            USER: Entity(self, identifier("Entity", 2), USER, "user", None, person),
            LONER: Entity(self, identifier("Entity", 3), LONER, "user", None, nobody),
            ORG_ENTITY: Entity(self, identifier("Entity", 4), ORG_ENTITY, "organization", self.org),
        }
        self.org.orgEntity = self.entities[ORG_ENTITY]
        self.replay()

    def replay(self) -> None:
        """Brings back what the folder's earlier servers did."""
        self.replaying = True
        if self.journal_path.exists():
            for line in self.journal_path.read_text(encoding="utf-8").splitlines():
                query, variables, self.clock, self.counter = json.loads(line)
                Execution(parsed(query), variables).answer(self)
            self.clock = None
        self.replaying = False
        self.journal = self.journal_path.open("a", encoding="utf-8")

    def execute(self, query: str, variables: dict[str, Any], role: str) -> dict[str, Any]:
        """The data of one operation, under the lock."""
        run = Execution(parsed(query), variables)
        with self.lock:
            changes = is_mutation(run.operation)
            if changes and role != "write":
                raise Refused("permission denied", 403, "PERMISSION_ERROR")
            before = self.counter
            self.clock = time.time()
            self.org._advanced_search = self.options.advanced_search
            try:
                data = run.answer(self)
                if changes:
                    line = json.dumps([query, variables, self.clock, before])
                    self.journal.write(line + "\n")
                    self.journal.flush()
            finally:
                self.clock = None
            return data

    def now(self) -> float:
        return self.clock or time.time()

    def number(self) -> int:
        self.counter += 1
        return self.counter

    def url(self, kind: str, name: str) -> str:
        """Where a payload is put and got; the URL is the permission."""
        return f"{self.base_url}/storage/{kind}/{name}"

    def is_read_only(self, project: Project) -> bool:
        return not self.replaying and f"{project.entity.name}/{project.name}" in (
            self.options.read_only
        )

    # The queries: each method is a field of the root.

    def viewer(self) -> dict[str, Any]:
        return {
            "__typename": "User",
            "id": identifier("User", 1),
            "name": USER,
            "username": USER,
            "email": f"{USER}@example.invalid",
            "admin": False,
            "flags": "{}",
            "entity": TEAM,
            "deletedAt": None,
            "apiKeys": connection([], 50, None),
            "teams": connection([{"__typename": "Entity", "name": TEAM}], 50, None),
        }

    def serverInfo(self) -> dict[str, Any]:
        features = {**FEATURES, **self.options.features}
        return {
            "__typename": "ServerInfo",
            "cliVersionInfo": json.dumps({"max_cli_version": "99.0.0"}),
            "latestLocalVersionInfo": None,
            "features": [
                {"__typename": "ServerFeature", "name": name, "isEnabled": on}
                for name, on in features.items()
            ],
        }

    def entity(self, name: str) -> Entity | None:
        return self.entities.get(name)

    def organization(self, name: str) -> Organization | None:
        return self.org if name == ORG else None

    def project(self, name: str | None = None, entityName: str | None = None) -> Project | None:
        return self.projects.get((entityName or TEAM, name or "uncategorized"))

    model = project

    def models(
        self, entityName: str | None = None, first: int | None = None, after: str | None = None
    ) -> dict[str, Any]:
        mine = [p for p in self.projects.values() if p.entity.name == (entityName or TEAM)]
        return connection(mine, first, after)

    def artifact(self, id: str) -> Artifact | None:
        found = self.artifacts.get(id)
        return found if found and found.state != "DELETED" else None

    def artifactCollection(self, id: str) -> Collection | None:
        return next((c for c in self.collections.values() if c.id() == id), None)

    def clientIDMapping(self, clientID: str) -> dict[str, Any] | None:
        found = self.by_client.get(clientID)
        return {"__typename": "ClientIDMapping", "serverID": found.id()} if found else None


def described(query: str) -> str:
    """The name of a document's operation."""
    return name_of(Execution(parsed(query), {}).operation)
