"""What `ls` and `find` answer: one page of rows and where the next one begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from modulelens.cli.command import Reply
from modulelens.cli.repos import open_repo, repo_place, with_repo
from modulelens.errors import UsageError
from modulelens.report.rows import rows_table

if TYPE_CHECKING:
    from modulelens.repo import Repo


class ListedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry in a list. `bytes` counts its own tensors; `grade` is empty before verification.

    `tables`: embedding tables of which rows were kept, as "weight 1024/40000".
    """

    id: str
    name: str
    version: int
    cls: str
    params: int
    bytes: int
    grade: str
    date: str
    tags: tuple[str, ...]
    tables: tuple[str, ...]


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """One page. `next_offset` is None on the last one."""

    total: int
    next_offset: int | None
    entries: tuple[ListedEntry, ...]


def list_entries(filter: Mapping[str, Any], *, repo: str | None, limit: int, offset: int) -> Reply:
    """One page of the entries that fit `filter`."""
    if limit < 1 or offset < 0:
        raise UsageError(f"--limit {limit} --offset {offset}: at least 1 and 0")
    opened = open_repo(repo)
    rows = opened.rows(filter, limit=limit, offset=offset)
    is_last = len(rows) < limit and (rows or not offset)
    total = offset + len(rows) if is_last else opened.count(filter)  # a remote would search again
    last = offset + len(rows)
    data = Listing(
        total=total,
        next_offset=last if rows and last < total else None,
        entries=tuple(
            ListedEntry(
                id=row.id,
                name=row.name,
                version=row.version,
                cls=row.cls,
                params=row.params,
                bytes=row.bytes,
                grade=row.grade or "",
                date=row.date or "",
                tags=tuple(row.tags),
                tables=tuple(row.tables),
            )
            for row in rows
        ),
    )
    text = rows_table(rows, total=total, offset=offset)
    next_commands = [with_repo(f"show {rows[0].name}@v{rows[0].version}", repo)] if rows else []
    return Reply(data, text, next=next_commands, warnings=_doubts(opened, repo, total))


def _doubts(opened: Repo, place: str | None, total: int) -> list[str]:
    """A remote that is mistyped looks like one that is empty."""
    place = repo_place(place)
    if total or "://" not in place or opened.count():
        return []
    from modulelens.store.remote.pull import EMPTY

    return [f"{EMPTY} {place}: is it the right place?"]
