"""What goes from a repo to a team's remote, and comes from there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulelens.entry import Entry
from modulelens.errors import UsageError
from modulelens.store import LocalStore

if TYPE_CHECKING:
    from modulelens.store.remote.push import Pushed


class Shared:
    """What a `Repo` shares with others."""

    _store: LocalStore
    _entry: Callable[[str], Entry]
    find: Callable[..., Sequence[Entry]]

    def push(
        self,
        remote: str,
        filter: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        again: bool = False,
        tries: int = 5,
        progress: Callable[[Any], None] | None = None,
    ) -> Pushed:
        """Sends entries to a remote; what is there already is not sent again.

        New tags and aliases go with them; what others moved or removed at the remote since this
        repo sent or pulled it stays as they left it.
        Entries wait in the repo's outbox until they are there: what an interrupted push leaves,
        the next one sends. In a job of several ranks only rank 0 pushes.

        Args:
            remote: `wandb://entity/registry`, `s3://bucket/folder`, `file:///mnt/team`, ...
            filter: Which entries, as for `find`; None: all.
            wait: Send now; False: a process in the background does, beside the training.
            again: Also what was removed at the remote since, and in a folder or bucket the bytes of
                what is there, so that damaged ones are replaced.
            tries: How often to try while the remote does not answer.
            progress: Gets how far it is.

        Returns:
            How many were sent, were there, have been removed there, wait and failed.

        Raises:
            PermissionDenied: The remote does not let you. It is not tried again.
            UsageError: It is no URL of a remote, or RANK is no number.
            Conflict: Another process is pushing this repo to this remote: it sends these, too.
        """
        from modulelens.environment import rank_and_world
        from modulelens.store.remote.background import start
        from modulelens.store.remote.push import Pushed, send

        rank = os.environ.get("RANK") or "0"
        if not rank.removeprefix("-").isdecimal():
            raise UsageError(f"RANK={rank!r} is no number: only rank 0 pushes", hint="unset RANK")
        if rank_and_world()[0]:
            return Pushed()
        records = [entry.metadata for entry in self.find(filter)]
        if not wait:
            start(self._store, remote, records, again=again)
            return Pushed(waiting=len(records))
        return send(self._store, remote, records, tries=tries, again=again, report=progress)

    def pull(
        self,
        remote: str,
        ref: str | None = None,
        filter: Mapping[str, Any] | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Entry]:
        """Brings entries from a remote; what is here already is not fetched again.

        Every byte is checked against its digest before it gets into this repo.

        Args:
            remote: As for `push`.
            ref: One entry: `model/fqn`, `model/fqn@v2`, `model/fqn@alias`, `model`, or an id there.
            filter: Which entries, as for `find`, where no `ref` is given.
            progress: Gets the number of bytes that came.

        Raises:
            NotFound: There is no such entry.
            Corrupted: What came is not what was pushed; nothing of it stays.
        """
        from modulelens.store.remote import open_remote
        from modulelens.store.remote.pull import chosen, pull

        there = open_remote(remote)
        try:
            versions = chosen(there, ref, dict(filter or {}))
            found = pull(self._store, there, versions, progress=progress)
        finally:
            there.close()
        return [self._entry(metadata.id) for metadata in found]
