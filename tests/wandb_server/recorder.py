"""What arrived: operations with variables, bytes per blob, and what the server didn't know."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

KEPT_CALLS = 20_000


class Recorder:
    """Counts since the start or the last `reset`; safe to use from several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.operations: Counter[str] = Counter()
        self.http: Counter[str] = Counter()
        self.blobs: dict[str, dict[str, int]] = {}
        self.calls: deque[dict[str, Any]] = deque(maxlen=KEPT_CALLS)
        self.unknown: list[str] = []
        self.agents: Counter[str] = Counter()

    def called(self, name: str, variables: dict[str, Any], headers: dict[str, str]) -> None:
        """One GraphQL operation arrived, whatever became of it."""
        with self.lock:
            self.operations[name] += 1
            self.calls.append({"operation": name, "variables": variables, "headers": headers})

    def moved(self, verb: str, kind: str, name: str, size: int) -> None:
        """`size` bytes of a blob, manifest, part or run file went in (put) or out (get)."""
        with self.lock:
            blob = self.blobs.setdefault(
                f"{kind}/{name}", {"puts": 0, "put_bytes": 0, "gets": 0, "got_bytes": 0}
            )
            blob["puts" if verb == "put" else "gets"] += 1
            blob["put_bytes" if verb == "put" else "got_bytes"] += size

    def seen(self, what: str) -> None:
        """A request that is no operation arrived, whatever became of it, e.g. "put blob"."""
        with self.lock:
            self.http[what] += 1

    def did_not_know(self, what: str) -> None:
        with self.lock:
            self.unknown.append(what)

    def report(self) -> dict[str, Any]:
        """Everything but the calls."""
        with self.lock:
            return {
                "operations": dict(self.operations),
                "http": dict(self.http),
                "blobs": {name: dict(counts) for name, counts in self.blobs.items()},
                "unknown": list(self.unknown),
            }
