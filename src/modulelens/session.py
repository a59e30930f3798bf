"""`ml.trace`: watching, and where it is asked for, storing and sending what was captured."""

from __future__ import annotations

import warnings

from modulelens.capture.trace import Trace, keepers, trace
from modulelens.errors import UsageError
from modulelens.repo import Repo

__all__ = ["Trace", "trace"]


class Sender:
    """Implements `capture.trace.Keeper` with `ml.Repo()` and a process in the background."""

    def check(self, push: str) -> None:
        """Raises UsageError where `push` is not the URL of a remote."""
        from modulelens.store.remote import checked

        if not isinstance(push, str):
            raise UsageError(f"push={push!r} is no URL", hint="such as wandb://entity/registry")
        checked(push)

    def keep(self, trace: Trace) -> None:
        """Adds a trace to the repo and has it sent; training goes on whatever fails here."""
        try:
            repo = Repo()
            entries = repo.add(trace, verify=False)
            repo.push(trace.push or "", {"id": {"$in": [e.id for e in entries]}}, wait=False)
        except Exception as error:  # noqa: BLE001 - boundary: the user's training goes on
            text = f"{trace.name} was not pushed to {trace.push}: {error}"
            trace.warnings.append(text)
            warnings.warn(text, stacklevel=4)


keepers[:] = [Sender()]
