"""The HTTP side: authentication, payloads with ranges, faults, and the test's own control calls.

    POST /graphql, /files/ENTITY/PROJECT/RUN/file_stream     with the key
    PUT, GET /storage/KIND/NAME                              without: the URL is the permission
    GET /artifactsV2/...                                     with the key
    POST /_test                                              {"do": ..., ...}, see `control`

The server is also the HTTP(S) proxy of what runs under it, so that a request to any other machine
ends here and is reported as unknown.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from graphql import GraphQLError
from tests.wandb_server.executor import Refused, Unknown
from tests.wandb_server.faults import Fault, Faults
from tests.wandb_server.options import Options
from tests.wandb_server.recorder import Recorder
from tests.wandb_server.storage import CHUNK, BadBytes, chunks_of
from tests.wandb_server.world import World, described

NO_FAULT = Fault("get", delay_s=0.001)
QUIET = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)


class StandIn(ThreadingHTTPServer):
    """The listening socket with the state, the faults and the recorder."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, folder: Path, options: Options, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.recorder = Recorder()
        self.faults = Faults()
        self.options = options
        self.world = World(folder, options)
        self.world.base_url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is normal; anything else is printed."""
        if not isinstance(sys.exc_info()[1], QUIET):
            super().handle_error(request, client_address)

    def control(self, order: dict[str, Any]) -> Any:
        """What the test wants: fault, clear, report, calls, reset or set."""
        match order["do"]:
            case "fault":
                return self.faults.add(order["fault"])
            case "clear":
                return self.faults.clear()
            case "report":
                return {**self.recorder.report(), "faults_taken": self.faults.taken}
            case "calls":
                wanted = order.get("operation")
                calls = list(self.recorder.calls)
                return [c for c in calls if wanted in (None, c["operation"])]
            case "reset":
                self.faults.taken = 0
                return self.recorder.reset()
            case "set":
                for name, value in order["options"].items():
                    if name not in asdict(self.options):
                        raise ValueError(f"no option {name!r}: {sorted(asdict(self.options))}")
                    setattr(self.options, name, value)
                return None
        raise ValueError(f"the server can't {order['do']!r}")


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the recorder knows."""

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        if path == "/_test":
            self.answer_control()
        elif path == "/graphql":
            time.sleep(self.server.options.latency_s)
            self.graphql()
        elif path.endswith("/file_stream"):
            time.sleep(self.server.options.latency_s)
            self.file_stream()
        else:
            self.not_known()

    def answer_control(self) -> None:
        try:
            self.reply(200, {"ok": self.server.control(json.loads(self.body()))})
        except (ValueError, TypeError, KeyError) as error:
            self.reply(400, {"error": f"{type(error).__name__}: {error}"})

    def graphql(self) -> None:
        asked = json.loads(self.body())
        variables = asked.get("variables") or {}
        try:
            name = described(asked["query"])
        except GraphQLError as error:
            self.server.recorder.did_not_know(f"a query that doesn't parse: {error}")
            return self.reply(400, failed("?", Refused(str(error))))
        self.server.recorder.called(name, variables, self.told())
        fault = self.fault("gql", name, json.dumps(variables))
        if self.struck(fault, early=True) or not (role := self.role()):
            return None
        try:
            answer, status = (
                {"data": self.server.world.execute(asked["query"], variables, role)},
                200,
            )
        except Unknown as unknown:
            self.server.recorder.did_not_know(f"{name}: {unknown}")
            answer, status = failed(name, unknown), 200
        except Refused as refused:
            answer, status = failed(name, refused), refused.status
        except (TypeError, KeyError, GraphQLError) as error:
            self.server.recorder.did_not_know(f"{name}: {type(error).__name__}: {error}")
            answer, status = failed(name, Refused(str(error))), 200
        if not self.struck(fault, early=False):
            self.reply(status, answer)
        return None

    def file_stream(self) -> None:
        self.body()
        self.server.recorder.seen("post file_stream")
        fault = self.fault("stream", self.path)
        if not self.struck(fault, early=True) and self.role():
            self.reply(200, {"exitcode": None, "limits": {}})

    def do_PUT(self) -> None:
        kind, name = self.stored()
        if not kind:
            return self.not_known()
        self.server.recorder.seen(f"put {kind}")
        fault = self.fault("put", self.path)
        if self.struck(fault, early=True, body=True):
            return None
        size = 0

        def counted() -> Iterator[bytes]:
            nonlocal size
            for chunk in self.chunks():
                size += len(chunk)
                yield chunk

        try:
            md5 = self.server.world.storage.write(
                kind, name, counted(), self.headers.get("Content-MD5")
            )
        except BadBytes as damage:
            for _ in self.chunks():
                pass
            return self.reply(400, {"error": str(damage)})
        self.server.recorder.moved("put", kind, name, size)
        if not self.struck(fault, early=False):
            self.reply(200, b"", {"ETag": f'"{md5}"'})
        return None

    def do_GET(self) -> None:
        if self.path.startswith("/artifactsV2/"):
            return self.by_digest()
        kind, name = self.stored()
        if not kind:
            return self.not_known()
        return self.send(kind, name)

    def by_digest(self) -> None:
        """The fallback that the SDK takes when a signed URL was refused."""
        self.server.recorder.seen("get artifactsV2")
        if self.role():
            self.send("blob", urlsplit(self.path).path.split("/")[-2])

    def send(self, kind: str, name: str) -> None:
        self.server.recorder.seen(f"get {kind}")
        fault = self.fault("get", self.path)
        if self.struck(fault, early=True):
            return
        path = self.server.world.storage.path(kind, name)
        if not path.is_file():
            return self.reply(404, {"error": f"no {kind} {name}"})
        whole = path.stat().st_size
        start, end = self.range(whole)
        if fault.short:
            end = start + (end - start) // 2
        headers = {"ETag": f'"{name}"', "Accept-Ranges": "bytes"}
        if partial := "Range" in self.headers:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{whole}"
        self.head(206 if partial else 200, end - start, headers)
        last = start + (end - start) // 2 if fault.truncate else end
        self.server.recorder.moved("get", kind, name, last - start)
        for chunk in flipped(chunks_of(path, start, last), fault.corrupt):
            self.wfile.write(chunk)
        if fault.truncate:
            self.close_connection = True
        return None

    def do_CONNECT(self) -> None:
        self.not_known()

    do_DELETE = do_HEAD = do_PATCH = do_CONNECT

    def not_known(self) -> None:
        """404 for what no SDK should ask here; the telemetry probe is also an unknown request."""
        for _ in self.chunks():
            pass
        self.server.recorder.did_not_know(f"{self.command} {self.path}")
        self.reply(404, {"error": "not found"})

    # The parts of a request.

    def role(self) -> str:
        """What the key may do; without a good key answers 401 and returns ''."""
        scheme, _, secret = self.headers.get("Authorization", "").partition(" ")
        if scheme == "Basic":
            key = base64.b64decode(secret).decode(errors="replace").partition(":")[2]
            if role := self.server.options.keys.get(key):
                return role
        self.reply(401, {"errors": [{"message": "user is not logged in"}]})
        return ""

    def told(self) -> dict[str, str]:
        """The headers, without the key."""
        return {k.lower(): v for k, v in self.headers.items() if k.lower() != "authorization"}

    def stored(self) -> tuple[str, str]:
        """Kind and name of a payload's URL."""
        found = re.fullmatch(r"/storage/(blob|part|manifest|run)/([^/]+)", urlsplit(self.path).path)
        return (found[1], unquote(found[2])) if found else ("", "")

    def range(self, whole: int) -> tuple[int, int]:
        """The half-open range of bytes that is asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not found:
            return 0, whole
        return int(found[1]), min(int(found[2]) + 1, whole) if found[2] else whole

    def body(self) -> bytes:
        raw = b"".join(self.chunks())
        return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

    def chunks(self) -> Iterator[bytes]:
        """The body as it comes, once; a second time there is nothing left."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            del self.headers["Transfer-Encoding"]
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        del self.headers["Content-Length"]
        while left:
            chunk = self.rfile.read(min(CHUNK, left))
            if not chunk:
                raise ConnectionResetError("the client closed the connection in its body")
            left -= len(chunk)
            yield chunk

    # The parts of a reply.

    def fault(self, kind: str, name: str, detail: str = "") -> Fault:
        fault = self.server.faults.take(kind, name, detail, self.headers.get("X-Fault"))
        if fault and fault.delay_s:
            time.sleep(fault.delay_s)
        return fault or NO_FAULT

    def struck(self, fault: Fault, *, early: bool, body: bool = False) -> bool:
        """Whether a fault took the place of the reply, before or after the request's effect."""
        if fault.after is early:
            return False
        if fault.drop:
            self.reset()
        elif fault.status:
            for _ in self.chunks() if body else ():
                pass
            self.reply(fault.status, failed("injected", Refused("injected fault")), fault.headers)
        elif fault.message:
            self.reply(200, failed("injected", Refused(fault.message)), fault.headers)
        else:
            return False
        return True

    def reset(self) -> None:
        """Ends the connection with a reset instead of a goodbye."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if isinstance(body, bytes) else {"Content-Type": "application/json"}
        self.head(status, len(raw), {**kind, **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(raw)


def failed(operation: str, refused: Refused) -> dict[str, Any]:
    """The reply of an operation that failed."""
    error: dict[str, Any] = {"message": str(refused), "path": [operation]}
    if refused.code:
        error["extensions"] = {"code": refused.code}
    return {"data": None, "errors": [error]}


def flipped(chunks: Iterable[bytes], corrupt: bool) -> Iterator[bytes]:
    """The chunks, or the same with one bit of the first one flipped."""
    for chunk in chunks:
        if corrupt:
            yield bytes([chunk[0] ^ 1]) + chunk[1:]
        else:
            yield chunk
        corrupt = False


def serve(folder: Path, options: Options, port: int = 0) -> StandIn:
    """A server that answers in threads of this process; port 0 takes a free one."""
    server = StandIn(folder, options, port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
