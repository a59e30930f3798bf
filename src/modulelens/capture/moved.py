"""Where a class that is gone may be by now. Reads source files; imports and runs nothing."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from modulelens.capture.source import source_digest

_MOST_FILES = 2000
#: A class at the top level of a file: its line, and the indented and empty ones below.
_CLASS = re.compile(r"^class (\w+)\b.*\n(?:[ \t].*\n|\s*\n)*", re.MULTILINE)


def find_moved(path: str, digest: str, root: str) -> Iterator[str]:
    """`module:qualname` of the classes below `root` that have that source, by whatever name.

    Args:
        path: The `module:qualname` that the class had.
        digest: The digest of its source then.
        root: The folder that its package was found in.
    """
    name = path.rpartition(":")[2]
    folder = Path(root)
    inside = (folder / path.partition(":")[0].partition(".")[0]).rglob("*.py")
    for file in itertools.islice(itertools.chain(folder.glob("*.py"), inside), _MOST_FILES):
        if not os.access(file, os.R_OK) or not file.is_file():
            continue
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        for found in _CLASS.finditer(file.read_text(errors="replace") + "\n"):
            text = re.sub(rf"\b{found[1]}\b", lambda _: name, found[0].rstrip() + "\n")
            if source_digest(text) == digest:
                yield f"{module.removesuffix('.__init__')}:{found[1]}"
