"""Reads all that a remote has and names what is wrong: what `fsck` is for a repo on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from modulelens.errors import NotFound, RepoError
from modulelens.store.remote.packs import blobs_in
from modulelens.store.remote.pull import everything, fetch
from modulelens.store.remote.seam import Pack, Remote, Version
from modulelens.store.remote.spool import spool
from modulelens.store.remote.spread import spread
from modulelens.store.upkeep import FsckReport, Problem


def examine(remote: Remote, aside: Path, progress: Callable[[int], None]) -> FsckReport:
    """Fetches every record and every pack, and checks each against its digest; keeps nothing.

    Args:
        remote: What is read.
        aside: Where a pack lies while it is read.
        progress: Gets the number of bytes that came since the last call.
    """
    problems: list[Problem] = []
    users: dict[tuple[str, str], list[str]] = {}
    needed: dict[tuple[str, str], Pack] = {}

    def record(version: Version) -> None:
        try:
            found = fetch(remote, version)
        except (NotFound, RepoError) as error:
            problems.append(Problem(version.row.id, error.code, error.message))
            return
        for pack in found.packs:
            needed[pack.name, pack.place] = pack
            users.setdefault((pack.name, pack.place), []).append(
                f"{version.row.name}@v{version.version}"
            )

    versions = everything(remote, {})
    spread(record, versions)
    for key, pack in needed.items():
        try:
            with spool(aside) as folder:
                remote.fetch_packs([pack], folder, progress=progress)
                for _ in blobs_in(folder / pack.name, pack):
                    pass
        except (NotFound, RepoError) as error:
            problems.append(
                Problem(pack.name, error.code, error.message, tuple(sorted(users[key])))
            )
    blobs = {digest for pack in needed.values() for digest in pack.blobs}
    return FsckReport(problems=tuple(problems), entries=len(versions), blobs=len(blobs))
