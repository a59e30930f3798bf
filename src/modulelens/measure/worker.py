"""A warm process in which foreign code runs: it may crash, hang, print or exit, and harms nobody.

    this process  --pipe-->  warm process          --fork-->  executor
    Worker.call              imports torch once,              runs the function, in a fork of its
                             never runs foreign code          own (isolate) or in one that stays

Knows functions by name and JSON, no module and no tensor. The far side is `worker_main`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

import msgspec

from modulelens import errors

#: Asked again and again while a call runs; True ends it.
Stop = Callable[[], bool] | None
_START_S = 180.0
_GRACE_S = 10.0
_TAIL_BYTES = 8192
_TICK_S = 0.02


class Stopped(Exception):
    """A call ended because its `stop` said so; the process that ran it is gone."""


class Worker:
    """A warm worker; starts at the first call, restarts after it died, ends with its scope.

    Args:
        timeout_s: Wall-clock limit of one call.
        memory_bytes: Most data that one call may hold on top of the warm process; None: what the
            machine has to spare when the call begins.
        path: Folders put in front of `sys.path`.
        preload: Modules imported before the first call.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 120.0,
        memory_bytes: int | None = None,
        path: Sequence[str] = (),
        preload: Sequence[str] = ("torch",),
    ) -> None:
        self._timeout_s = timeout_s
        self._config = {"path": list(path), "preload": list(preload), "memory": memory_bytes}
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._output: IO[bytes]
        self._tail = bytearray()
        self._lock = threading.Lock()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def output_tail(self) -> str:
        """The end of what the last call printed, at most 8 kB."""
        return self._tail.decode(errors="replace")

    @property
    def pid(self) -> int | None:
        """The warm process's id; None while there is none."""
        return self._process.pid if self._process else None

    def call(
        self,
        target: str,
        args: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        isolate: bool = True,
        stop: Stop = None,
    ) -> Any:
        """Runs `package.module:function(**args)` and returns its result as plain JSON values.

        Args:
            target: The function.
            args: Its keyword arguments; whatever JSON can say.
            timeout_s: Limit of this call; None: the worker's.
            isolate: Run in a fork of its own. False reuses one process for many calls: faster,
                but a call sees what earlier ones left behind.
            stop: Asked again and again while it runs; True ends it.

        Raises:
            Stopped: `stop` said so.
            TimedOut: It did not end in time; the process that ran it is gone.
            WorkerCrashed: Its process died.
            ForeignError: It raised. An error of ModuleLens' own is raised again as it was.
        """
        request = {"kind": "isolated" if isolate else "shared", "target": target, "args": args}
        return self._ask(request, timeout_s, stop)

    def warm(self, target: str, args: dict[str, Any] | None = None) -> Any:
        """Runs a trusted function in the warm process itself: all later calls find its effect.

        Only for code that starts no threads, as reading a payload into memory.
        """
        return self._ask({"kind": "warm", "target": target, "args": args}, _START_S)

    def close(self) -> None:
        """Ends the warm process and all it started. A later call starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()  # the warm process ends itself, and what it started, at this
        self._output.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _ask(self, request: dict[str, Any], timeout_s: float | None, stop: Stop = None) -> Any:
        limit = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self.close()
                    self._start()
                self._tail.clear()
                request |= {"args": request["args"] or {}, "limit": limit}
                reply = self._exchange(request, limit + _GRACE_S, stop)
            except BaseException:  # boundary: Ctrl-C and a dead worker alike leave no process
                self.close()
                raise
        if "result" in reply:
            return reply["result"]
        if "stopped" in reply:
            raise Stopped
        raise self._error(reply, request["target"], limit)

    def _start(self) -> None:
        self._pipe, far = Pipe()
        folders = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "modulelens.measure.worker_main", str(far.fileno())],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[far.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
            start_new_session=True,
        )
        far.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._exchange(self._config, _START_S)

    def _exchange(self, message: Any, timeout_s: float, stop: Stop = None) -> dict[str, Any]:
        how = f"gave no answer in {timeout_s:.0f} s"
        deadline = time.monotonic() + timeout_s
        sources: list[Any] = [self._output, self._pipe]
        try:
            self._pipe.send_bytes(msgspec.json.encode(message))
            while (left := deadline - time.monotonic()) > 0:
                ready: list[Any] = wait(sources, min(left, _TICK_S) if stop else left)
                # First, so that what was printed before the answer is known with it.
                if self._output in ready:
                    self._drain(sources)
                elif ready:
                    return msgspec.json.decode(self._pipe.recv_bytes(), type=dict[str, Any])
                if stop and stop():
                    self._pipe.send_bytes(b'{"kind": "stop"}')
                    stop = None
        except (EOFError, OSError):
            how = "ended"
        raise errors.WorkerCrashed(
            f"the worker process of {sys.executable} {how}{self._last_words()}",
            hint="check that this interpreter can import modulelens and torch",
        )

    def _drain(self, sources: list[Any]) -> None:
        chunk = self._output.read(65536)
        self._tail += chunk
        del self._tail[:-_TAIL_BYTES]
        if not chunk:
            sources.remove(self._output)

    def _last_words(self) -> str:
        text = self.output_tail.strip()
        return f"; its last output:\n{text[-2000:]}" if text else ""

    def _error(self, reply: dict[str, Any], target: str, timeout_s: float) -> Exception:
        if reply.get("timeout"):
            return errors.TimedOut(
                f"{target} did not end within {timeout_s:g} s and was stopped{self._last_words()}",
                hint="raise the limit, or look for an endless loop",
            )
        if "crash" in reply:
            text = f"the process that ran {target} {reply['crash']}{self._last_words()}"
            return errors.WorkerCrashed(text, kind=reply["crash"])
        raised = reply["error"]
        if raised["own"] is not None:
            cls: type[errors.ModuleLensError] = getattr(errors, raised["kind"])
            error = cls.__new__(cls, raised["message"])
            vars(error).update(raised["own"])
            error.did_you_mean = tuple(error.did_you_mean)
            return error
        text = f"{target} raised {raised['kind']}: {raised['message']}"
        return errors.ForeignError(text, kind=raised["kind"], traceback=raised["traceback"])
