"""What goes wrong on purpose: which request, how often, and in which way.

A fault is a dict, sent by `Server.fail` or in the header `X-Fault` of a request (a JSON list of
faults, or one), which then concerns the requests with that same header alone. The SDK sends it with
`Settings(x_extra_http_headers={"X-Fault": ...})`.

    kind      gql, put, get or stream (the run's file stream)
    match     regex, searched in the operation's name, or in the path of the URL
    where     regex, searched in the JSON text of an operation's variables
    n         how many requests; -1 for all
    skip      how many fitting requests pass before it
    status    this HTTP status, with `headers`
    message   a GraphQL error in a reply of status 200
    drop      true: the connection is reset without a reply
    corrupt   true: a bit of a downloaded body flips, its length stays
    short     true: half of the body, and a Content-Length that fits
    truncate  true: half of the body of the announced length, then the connection closes
    delay_s   waits before anything else
    after     true: `status`, `message` and `drop` come after the request has taken effect
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Fault:
    """One fault; see the file's docstring for the meaning of each field."""

    kind: str
    match: str = ""
    where: str = ""
    n: int = 1
    skip: int = 0
    status: int = 0
    message: str = ""
    drop: bool = False
    corrupt: bool = False
    short: bool = False
    truncate: bool = False
    delay_s: float = 0.0
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in {"gql", "put", "get", "stream"}:
            raise ValueError(f"a fault's kind is gql, put, get or stream, not {self.kind!r}")
        if not (
            self.status
            or self.message
            or self.drop
            or self.delay_s
            or (self.kind == "get" and (self.corrupt or self.short or self.truncate))
        ):
            raise ValueError(f"a fault of kind {self.kind!r} that changes nothing: {self}")

    def fits(self, kind: str, name: str, detail: str) -> bool:
        return (
            kind == self.kind
            and re.search(self.match, name) is not None
            and re.search(self.where, detail) is not None
        )


class Faults:
    """The faults that wait; the first that fits a request is taken."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Fault] = []
        self.of_header: dict[str, list[Fault]] = {}
        self.taken = 0

    def add(self, fault: dict[str, Any]) -> None:
        """Raises TypeError or ValueError for what is no fault."""
        made = Fault(**fault)
        with self.lock:
            self.waiting.append(made)

    def clear(self) -> None:
        with self.lock:
            self.waiting.clear()
            self.of_header.clear()

    def take(self, kind: str, name: str, detail: str, header: str | None) -> Fault | None:
        """The fault that this request meets, if any."""
        with self.lock:
            if header and header not in self.of_header:
                sent = json.loads(header)
                many = sent if isinstance(sent, list) else [sent]
                self.of_header[header] = [Fault(**each) for each in many]
            for fault in [*self.of_header.get(header or "", ()), *self.waiting]:
                if not fault.n or not fault.fits(kind, name, detail):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.n -= 1 if fault.n > 0 else 0
                self.taken += 1
                return fault
        return None
