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
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from modulelens import errors

_TICK_S = 0.05


@dataclasses.dataclass
class _Executor:
    pid: int
    pipe: Connection

    def end(self) -> None:
        """Kills the executor and all it started."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.pipe.close()


class _WarmProcess:
    """Reads requests, has each run by an executor, and answers; ends when nobody asks any more."""

    def __init__(self, asker: Connection) -> None:
        self._asker = asker
        self._shared: _Executor | None = None
        self._memory: int | None = None
        self._threads = 1

    def serve(self) -> None:
        self._prepare(msgspec.json.decode(self._asker.recv_bytes()))
        self._asker.send_bytes(b"{}")
        while (request := _received(self._asker)) is not None:
            message = msgspec.json.decode(request)
            if message["kind"] == "warm":
                self._asker.send_bytes(_reply(message))
            elif message["kind"] != "stop" and not self._run(request, message):
                break  # a stop may come after the answer that it was to prevent
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

    def _run(self, request: bytes, message: dict[str, Any]) -> bool:
        """Has a call run and answers; False when nobody asks any more."""
        shared = message["kind"] == "shared"
        executor = (self._shared if shared else None) or self._fork()
        self._shared = executor if shared else self._shared
        with contextlib.suppress(BrokenPipeError):
            executor.pipe.send_bytes(request)
        reply, keep = self._wait(executor, time.monotonic() + message["limit"])
        if reply is not None:
            self._asker.send_bytes(reply)  # ending a process that holds a module takes a while
        if not (shared and keep):
            executor.end()
            self._shared = None if shared else self._shared
        return reply is not None

    def _wait(self, executor: _Executor, deadline: float) -> tuple[bytes | None, bool]:
        """The answer, None when the asker is gone; and whether the executor lives on."""
        while (left := deadline - time.monotonic()) > 0:
            # Before the pipe: a child that it left behind may hold that open.
            ended = os.waitid(os.P_PID, executor.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ready = wait([executor.pipe, self._asker], 0 if ended else min(left, _TICK_S))
            if executor.pipe in ready and (data := _received(executor.pipe)) is not None:
                return data, True
            if executor.pipe in ready or ended:
                return _crash(executor.pid), False
            if ready:  # the asker says stop, or is gone
                return b'{"stopped": true}' if _received(self._asker) else None, False
        return b'{"timeout": true}', False

    def _fork(self) -> _Executor:
        here, far = Pipe()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            here.close()
            self._asker.close()
            self._execute(far)
        far.close()
        return _Executor(pid, here)

    def _execute(self, pipe: Connection) -> NoReturn:
        try:
            os.setpgid(0, 0)
            self._limit()
            while (request := _received(pipe)) is not None:
                message = msgspec.json.decode(request)
                # Shortly before it is stopped, it says where it is.
                faulthandler.dump_traceback_later(max(message["limit"] - 0.2, 0.05))
                pipe.send_bytes(_reply(message))
                faulthandler.cancel_dump_traceback_later()
        finally:
            os._exit(0)

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if Path("/proc/self/statm").exists():
            Path("/proc/self/oom_score_adj").write_text("1000")  # first to go where memory ends
            held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            limit = held + (self._memory or _spare_bytes())
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._threads)


def _spare_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


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
    story = errors.text_of("".join(traceback.format_exception(error)))
    return {
        "kind": type(error).__name__,
        "message": errors.text_of(error)[:4000],
        "own": vars(error) if type(error).__module__ == errors.__name__ else None,
        "traceback": story[-8000:],
    }


def _received(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):  # the other end is gone, perhaps within a message
        return None


def _crash(pid: int) -> bytes:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return msgspec.json.encode({"crash": f"{how} before it gave a result"})


if __name__ == "__main__":
    _WarmProcess(Connection(int(sys.argv[1]))).serve()
