"""`ml.trace`: watching, and where it is asked for, storing and sending what was captured."""

from __future__ import annotations

import warnings

from modulelens.capture.trace import Trace, keepers, trace
from modulelens.repo import Repo

__all__ = ["Trace", "trace"]


def store_and_push(captured: Trace) -> None:
    """Adds a trace to `ml.Repo()` and leaves the rest to a process in the background.

    Training goes on whatever fails here: that is a warning.
    """
    try:
        repo = Repo()
        entries = repo.add(captured, verify=False)
        repo.push(captured.push or "", {"id": {"$in": [e.id for e in entries]}}, wait=False)
    except Exception as error:  # noqa: BLE001 - boundary: the user's training goes on
        text = f"{captured.name} was not pushed to {captured.push}: {error}"
        captured.warnings.append(text)
        warnings.warn(text, stacklevel=4)


keepers[:] = [store_and_push]
