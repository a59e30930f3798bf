"""Checks of one entry in processes of their own, once or after each edit.

Knows a check as a task by name and JSON, its verdict as a record; neither entries nor torch.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modulelens import errors
from modulelens.environment import is_own
from modulelens.measure.files import Files
from modulelens.measure.worker import Stop, Stopped, Worker
from modulelens.records import Check, Status

_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_MOST_PRINTED = 2000


class Apart:
    """Checks of one entry, each in a process that ends with it.

    Args:
        task: What `tasks.check_task` takes.
        path: Folders to import from.
        timeout_s: Limit of one check.
    """

    def __init__(self, task: dict[str, Any], *, path: Sequence[str], timeout_s: float) -> None:
        self._notes = tempfile.NamedTemporaryFile(prefix="modulelens-")  # noqa: SIM115
        self._task = task | {"notes": self._notes.name}
        self._timeout_s = timeout_s
        self._worker = Worker(timeout_s=timeout_s, path=path)
        self._modules: list[str] = []
        self._held: list[str] = []
        self._ready = False

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.close()
        self._notes.close()

    def check(self, stop: Stop = None) -> Check:
        """The verdict on the code as it is now.

        Raises:
            Stopped: `stop` said so.
            ModuleLensError: What is wrong is not the code: no such call, a damaged repo.
        """
        Path(self._notes.name).write_bytes(b"")
        code = self._task["candidate"] or ""
        try:
            found, modules = self._worker.call("modulelens.tasks:check_task", self._task, stop=stop)
            self._modules = list(dict.fromkeys(self._modules + modules))
            self._ready = self._ready and not modules
            check = msgspec.convert(found, Check)
        except errors.TimedOut:
            reason = f"did not end within {self._timeout_s:g} s and was stopped{self._place()}"
            check = Check(status=Status.TIMEOUT, reason=reason, code=code)
        except errors.ForeignError as error:
            reason = error.message.removeprefix("modulelens.tasks:check_task ")
            if isinstance(error, errors.WorkerCrashed) and error.kind:
                reason = f"its process {error.kind}{self._place()}"
            check = Check(status=Status.RUNTIME_ERROR, reason=reason, code=code)
        printed = self._worker.output_tail[-_MOST_PRINTED:]
        return msgspec.structs.replace(check, printed=printed)

    def _place(self) -> str:
        """Where the user's code was, from the stack that a dying process printed."""
        frames = _FRAME.findall(self._worker.output_tail)
        found = next((frame for frame in frames if is_own(frame[0])), None)
        return f" at {found[0]}:{found[1]} in {found[2]}" if found else ""

    def noted(self) -> dict[str, str]:
        """Path -> digest of the user's files that the last check imported; empty: it is missing."""
        lines = Path(self._notes.name).read_text().splitlines()
        return {path: digest for digest, _, path in (line.partition(" ") for line in lines)}

    def get_ready(self) -> list[str]:
        """Lets next checks begin with packages imported and bytes read; files that this fixes."""
        if self._ready:
            return self._held
        task = {"repo": self._task["repo"], "entry": self._task["entry"], "modules": self._modules}
        try:
            self._held = self._worker.warm("modulelens.tasks:hold_task", task)
        except errors.ModuleLensError:
            self._worker.close()  # each check imports what it needs: slower, and the same
        self._ready = True
        return self._held

    def forget(self, changed: Iterable[str]) -> None:
        """Starts anew where the warm process holds one of these files as it was."""
        if not set(self._held).isdisjoint(changed):
            self._worker.close()
            self._held = []


def watch(
    apart: Apart, paths: Iterable[str], started: Callable[[tuple[str, ...]], None]
) -> Iterator[Check]:
    """A verdict now, and one after each edit of a file that the code comes from; never ends.

    Args:
        apart: The checks.
        paths: Files to watch from the start; those that a check imports come on top.
        started: Called with the files that changed whenever a check begins.

    Raises:
        ModuleLensError: The first check found that what is asked for does not exist.
        RepoError: The repo is damaged.
    """
    files, saved = Files(), None
    changed: dict[str, str] = {}
    files.add(paths)
    refused: tuple[type[errors.ModuleLensError], ...] = (errors.ModuleLensError,)
    while True:
        started(_names(changed))
        try:
            check = apart.check(stop=lambda: bool(files.changed()))
        except refused:
            raise
        except errors.ModuleLensError as error:
            check = Check(status=Status.RUNTIME_ERROR, reason=error.message)
        except Stopped:
            check = None
        files.know(apart.noted())
        if check is not None and not files.changed():  # else it is about what was
            took = None if saved is None else time.time() - saved
            yield msgspec.structs.replace(check, changed=_names(changed), after_save_s=took)
            changed, refused = {}, (errors.RepoError,)
            files.add(apart.get_ready())
            files.wait()
        newer, saved = files.settled()
        files.know(newer)
        changed |= newer
        apart.forget(newer)


def _names(changed: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({os.path.relpath(os.path.realpath(path)) for path in changed}))
