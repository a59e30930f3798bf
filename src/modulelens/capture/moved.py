"""Where a class that is gone may be by now. Reads source files; imports and runs nothing."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from modulelens.capture.source import source_digest

_MOST_FILES = 2000


def find_moved(path: str, digest: str, root: str) -> list[str]:
    """`module:qualname` of the classes below `root` that have that source, by whatever name.

    Args:
        path: The `module:qualname` that the class had.
        digest: The digest of its source then.
        root: The folder that its package was found in.
    """
    name = path.rpartition(".")[2].rpartition(":")[2]
    package = path.partition(":")[0].partition(".")[0]
    folder = Path(root)
    files = itertools.chain(folder.glob("*.py"), (folder / package).rglob("*.py"))
    return [
        found
        for file in itertools.islice(files, _MOST_FILES)
        for found, text in _classes(file, ".".join(file.relative_to(folder).with_suffix("").parts))
        if source_digest(re.sub(rf"\b{found.rpartition(':')[2]}\b", name, text)) == digest
    ]


def _classes(file: Path, module: str) -> Iterator[tuple[str, str]]:
    """The file's own classes with their text."""
    try:
        text = file.read_text()
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):  # whatever lies in the folder of a user's code
        return
    lines = text.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            block = "".join(lines[node.lineno - 1 : node.end_lineno])
            yield f"{module.removesuffix('.__init__')}:{node.name}", block
