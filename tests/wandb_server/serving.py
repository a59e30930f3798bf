"""Starts the stand-in server, points wandb at it and nowhere else, and takes both away again."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.wandb_server.options import ORG, ORG_ENTITY, READ_KEY, TEAM, WRITE_KEY

ROOT = Path(__file__).parents[2]
# An opener without proxies; urlopen's own keeps the proxies of its first use for ever.
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Server:
    """A running stand-in server, seen from the test.

    Attributes:
        folder: Holds its state (journal, `blob/`, `run/`, ...); a later server goes on from there.
        options: See `options.Options`; `set` changes them while it runs.
        env: The whole environment that a child process needs to use it.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    key: str = WRITE_KEY
    read_key: str = READ_KEY
    entity: str = TEAM
    org: str = ORG
    org_entity: str = ORG_ENTITY
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """What WANDB_BASE_URL says."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, a second time on the same port and with the same state."""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.wandb_server",
                str(self.folder),
                str(self.port),
                json.dumps(self.options),
            ],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("WANDB_")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        """Ends it: connections are refused from now on, until `start`. What it recorded is lost."""
        if self.process is None:
            return
        self.process.communicate()
        self.process = None

    def kill(self) -> None:
        """Ends it as a power cut would."""
        assert self.process
        self.process.kill()
        self.stop()

    def control(self, do: str, **what: Any) -> Any:
        """One control call; raises ValueError with the server's text for a wrong one."""
        body = json.dumps({"do": do, **what}).encode()
        request = urllib.request.Request(f"{self.url}/_test", body, {"X-Test": "1"})
        try:
            with LOCAL.open(request, timeout=30) as reply:
                return json.loads(reply.read())["ok"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(json.loads(error.read())["error"]) from None

    def posted(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of one GraphQL operation, without the SDK; ValueError with the errors' text."""
        key = base64.b64encode(f"api:{self.key}".encode()).decode()
        headers = {"Authorization": f"Basic {key}", "Content-Type": "application/json"}
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, headers)
        with LOCAL.open(request, timeout=30) as reply:
            answer = json.loads(reply.read())
        if answer.get("errors"):
            raise ValueError(answer["errors"][0]["message"])
        return answer["data"]

    def set(self, **options: Any) -> None:
        """Changes options, e.g. `set(latency_s=0.04)`, `set(read_only=["team/p"])`."""
        self.control("set", options=options)

    def fail(self, kind: str, match: str = "", **how: Any) -> None:
        """Injects a fault, e.g. `fail("put", "blob/", n=1, status=503)`; see `faults`."""
        self.control("fault", fault={"kind": kind, "match": match, **how})

    def heal(self) -> None:
        """Takes back every fault that is still waiting."""
        self.control("clear")

    def report(self) -> dict[str, Any]:
        """operations, http (e.g. "put blob"), blobs (puts, put_bytes, gets, got_bytes), unknown."""
        return self.control("report")

    def operations(self) -> Counter[str]:
        """How often each GraphQL operation came since the start or `forget`."""
        return Counter(self.report()["operations"])

    def calls(self, operation: str | None = None) -> list[dict[str, Any]]:
        """The calls in order: operation, variables and headers (without the key)."""
        return self.control("calls", operation=operation)

    def bytes(self) -> dict[str, int]:
        """Payloads and their bytes since the start or `forget`: blobs, manifests, run files."""
        total: Counter[str] = Counter(puts=0, put_bytes=0, gets=0, got_bytes=0)
        for counts in self.report()["blobs"].values():
            total.update(counts)
        return dict(total)

    @property
    def unknown(self) -> list[str]:
        """Operations, fields, arguments and URLs that the server didn't know."""
        return self.report()["unknown"]

    def forget(self) -> None:
        """Sets all counts to zero, and forgets what was unknown."""
        self.control("reset")


def isolated(folder: Path, url: str, key: str) -> dict[str, str]:
    """The environment in which wandb talks to `url` alone and writes below `folder` alone.

    Retries come after 1 s (the least that wandb honours) and at most twice. The proxy is the
    server: what isn't meant for this machine ends there, as an unknown request.
    """
    places = {
        "WANDB_DIR": "run",
        "WANDB_CACHE_DIR": "cache",
        "WANDB_DATA_DIR": "data",
        "WANDB_CONFIG_DIR": "config",
        "WANDB_ARTIFACT_DIR": "artifacts",
        "HOME": "home",
    }
    for name in places.values():
        (folder / name).mkdir(parents=True, exist_ok=True)
    retries = {
        f"WANDB__{kind}_RETRY_{name}": value
        for kind in ("GRAPHQL", "FILE_TRANSFER")
        for name, value in (("MAX", "2"), ("WAIT_MIN_SECONDS", "1"), ("WAIT_MAX_SECONDS", "1"))
    }
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), url)
    exempt = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return {
        **{name: str(folder / place) for name, place in places.items()},
        **retries,
        **proxies,
        **exempt,
        "NETRC": str(folder / "home" / "netrc"),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": key,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_INIT_TIMEOUT": "10",
        "WANDB__DISABLE_STATS": "true",
        "WANDB__DISABLE_META": "true",
    }


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Server]:
    """A stand-in server and an environment in which wandb knows no other; see the package.

    Args:
        folder: Taken for the server's state (`server/`) and for wandb's own folders (`client/`).
        options: `options.Options`, e.g. latency_s, advanced_search, features, read_only.

    Raises:
        AssertionError: On leaving, if the server met something that it does not know.
    """
    state, client = folder / "server", folder / "client"
    state.mkdir(parents=True, exist_ok=True)
    server = Server(state, options)
    end_wandb()
    # The service of before has ended; its address would be joined and found dead.
    before = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_SERVICE")}
    server.start()
    try:
        kept = {k: v for k, v in before.items() if not k.startswith("WANDB_")}
        server.env = {**kept, **isolated(client, server.url, server.key)}
        replace_environment(server.env)
        yield server
        unknown = server.unknown if server.process else []
        assert not unknown, f"the stand-in server doesn't know: {unknown}"
    finally:
        end_wandb()
        replace_environment(before)
        server.stop()


def replace_environment(wanted: dict[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)


def end_wandb() -> None:
    """Ends this process's wandb service, which keeps the server's address and its features."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
