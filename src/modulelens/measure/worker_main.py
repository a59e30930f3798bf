"""The far side of `Worker`: a warm process that forks executors. Run with `python -m`.

It runs no foreign code itself and uses one thread, so that its forks start clean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from modulelens.errors import ModuleLensError
from modulelens.measure.wire import receive, send

_TICK_S = 0.05


@dataclasses.dataclass
class _Executor:
    pid: int
    read: int
    write: int

    def end(self) -> None:
        """Kills the executor and all it started."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.read)
        os.close(self.write)


class _WarmProcess:
    """Reads requests, has each run by an executor, and answers; ends when nobody asks any more."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._shared: _Executor | None = None
        self._memory: int | None = None
        self._threads = 1

    def serve(self) -> None:
        config = receive(self._read)
        if config is None:
            return
        self._prepare(msgspec.json.decode(config))
        send(self._write, b"{}")
        while (request := receive(self._read)) is not None:
            message = msgspec.json.decode(request)
            reply = _reply(message) if message["kind"] == "warm" else self._run(request, message)
            if reply is None:
                break
            send(self._write, reply)
        if self._shared:
            self._shared.end()

    def _prepare(self, config: dict[str, Any]) -> None:
        faulthandler.enable()
        sys.path[:0] = config["path"]
        self._memory = config["memory"]
        for name in config["preload"]:
            importlib.import_module(name)
        if "torch" in sys.modules:
            self._threads = sys.modules["torch"].get_num_threads()
            # A thread pool made before a fork is dead after it, and the fork would wait for it.
            sys.modules["torch"].set_num_threads(1)

    def _run(self, request: bytes, message: dict[str, Any]) -> bytes | None:
        shared = message["kind"] == "shared"
        executor = (self._shared if shared else None) or self._fork()
        self._shared = executor if shared else self._shared
        with contextlib.suppress(BrokenPipeError):
            send(executor.write, request)
        reply, keep = self._wait(executor, time.monotonic() + message["limit"])
        if not (shared and keep):
            executor.end()
            self._shared = None if shared else self._shared
        return reply

    def _wait(self, executor: _Executor, deadline: float) -> tuple[bytes | None, bool]:
        """The answer, None when the asker is gone; and whether the executor lives on."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return b'{"timeout": true}', False
            ready, _, _ = select.select([executor.read, self._read], [], [], min(left, _TICK_S))
            if executor.read in ready:
                data = receive(executor.read)
                return (data, True) if data is not None else (_crash(executor.pid), False)
            if self._read in ready:
                return None, False
            ended = os.waitid(os.P_PID, executor.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended and not select.select([executor.read], [], [], 0)[0]:
                return _crash(executor.pid), False

    def _fork(self) -> _Executor:
        here, far = os.pipe(), os.pipe()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            for pipe in (here[0], far[1], self._read, self._write):
                os.close(pipe)
            self._execute(far[0], here[1])
        os.close(far[0])
        os.close(here[1])
        return _Executor(pid, here[0], far[1])

    def _execute(self, read: int, write: int) -> NoReturn:
        code = 0
        try:
            os.setpgid(0, 0)
            self._limit()
            while (request := receive(read)) is not None:
                send(write, _reply(msgspec.json.decode(request)))
        except BrokenPipeError:
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self._memory is not None:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = mapped + self._memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._threads)


def _reply(message: dict[str, Any]) -> bytes:
    try:
        module, _, name = message["target"].partition(":")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return msgspec.json.encode({"result": function(**message["args"])})  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - boundary: foreign code, SystemExit included
        return msgspec.json.encode({"error": _describe(error)})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _describe(error: BaseException) -> dict[str, Any]:
    own = isinstance(error, ModuleLensError)
    return {
        "kind": type(error).__name__,
        "own": own,
        "message": error.message if isinstance(error, ModuleLensError) else str(error)[:4000],
        "hint": getattr(error, "hint", "") if own else "",
        "reason": getattr(error, "reason", "") if own else "",
        "did_you_mean": getattr(error, "did_you_mean", ()) if own else (),
        "traceback": "".join(traceback.format_exception(error))[-8000:],
    }


def _crash(pid: int) -> bytes:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return b'{"crash": "ended"}'
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return msgspec.json.encode({"crash": f"{how} before it gave a result"})


if __name__ == "__main__":
    _WarmProcess(int(sys.argv[1]), int(sys.argv[2])).serve()
