"""Entries -> grades: each is replayed in a warm worker process, and its grade stored with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from modulelens.entry import Entry, _import_path
from modulelens.errors import ModuleLensError, TimedOut, WorkerCrashed
from modulelens.measure.worker import Worker
from modulelens.records import Grade, GradeLevel, Reason

_TIMEOUT_S = 600.0


def grade_all(entries: Sequence[Entry], progress: Callable[[int, int], None] | None = None) -> None:
    """Grades entries, and gives `progress` how many of them are done."""
    # One grade is stored while the worker finds the next one.
    with (
        ThreadPoolExecutor(1) as background,
        Worker(timeout_s=_TIMEOUT_S, path=_import_path()) as worker,
    ):
        noted = []
        # Constructors run when all else is done: what they leave behind in the process
        # would flatter the modules that are rebuilt without one.
        again: list[tuple[Entry, Grade | None]] = []
        for entry, before in itertools.chain([(e, None) for e in entries], again):
            grade, more = _graded(worker, entry, before)
            if more:
                again.append((entry, grade))
                continue
            noted.append(background.submit(entry._note, grade=grade))
            if progress is not None:
                progress(len(noted), len(entries))
        for note in noted:
            note.result()


def _graded(worker: Any, entry: Entry, structure: Grade | None) -> tuple[Grade, bool]:
    task = {**entry._address(), "structure": msgspec.to_builtins(structure)}
    try:
        found, more = worker.call("modulelens.tasks:grade_task", task, isolate=False)
        return msgspec.convert(found, Grade), more
    except ModuleLensError as error:
        codes = {TimedOut: Reason.TIMEOUT, WorkerCrashed: Reason.CRASHED}
        reason = (codes.get(type(error), Reason.RUNTIME_ERROR).value, error.message)
        return structure or Grade(level=GradeLevel.NO, reasons={"outputs": reason}), False
