"""Finds the repo and the entries that a command line names. Reads the environment for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from modulelens.errors import NotFound

if TYPE_CHECKING:
    from modulelens.entry import Entry
    from modulelens.repo import Repo


def repo_place(path: str | None) -> str:
    """Where the repo is: the option, else $MODULELENS_REPO, else `.modulelens`."""
    return path or os.environ.get("MODULELENS_REPO") or ".modulelens"


def open_repo(path: str | None, *, create: bool = False) -> Repo:
    """The repo of a command. Only a command that adds entries creates one.

    Raises:
        NotFound: There is none at that place.
    """
    place = repo_place(path)
    if not create and "://" not in place and not Path(place).expanduser().exists():
        raise NotFound(
            f"no repo at {place}",
            hint="`modulelens trace -- train.py` makes one; --repo names another",
        )
    from modulelens.repo import Repo

    return Repo(place)


def open_entry(ref: str, path: str | None) -> Entry:
    """The entry that `ref` names in the command's repo."""
    return open_repo(path)[ref]


def with_repo(words: str, path: str | None) -> str:
    """A command to suggest next, naming the repo where the user did."""
    return f"modulelens {words} --repo {path}" if path else f"modulelens {words}"
