"""Folders for files on their way. Knows nothing of what is in them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SPOOL = "modulelens-spool-"


@contextmanager
def spool(parent: Path | None = None) -> Iterator[Path]:
    """A folder for files on their way; without a parent, its path says nothing of the user's."""
    folder = Path(tempfile.mkdtemp(prefix=_SPOOL, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(older_s: float = 86_400.0) -> None:
    """Removes what killed workers left in the spool a day ago or earlier."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SPOOL}*"):
        try:
            if time.time() - folder.lstat().st_mtime > older_s and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue
