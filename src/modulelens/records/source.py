"""Where a class comes from, and how one instance of it was constructed."""

from __future__ import annotations

import msgspec

from modulelens.records.tensor import Structure


class SourceRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The source of a class at capture time.

    `path` is `module:qualname`. `root` is the folder that has to be on `sys.path` for the import.
    `digest` is over `text` (the class block). `reliable` is False when the text could not be
    shown to be the code that ran.
    """

    path: str
    file: str = ""
    line: int = 0
    root: str = ""
    text: str = ""
    digest: str = ""
    reliable: bool = True
    importable: bool = True
    git_commit: str = ""


class InitCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outermost constructor call of a module, its arguments as they were passed.

    `how` is "constructed" (exact) or "copied" (the record of the module it was deep-copied from).
    """

    cls: str
    args: Structure = None
    kwargs: Structure = None
    how: str = "constructed"
