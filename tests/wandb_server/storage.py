"""Payloads on disk: blobs named by their md5, multipart uploads, manifests and run files.

A file appears under its name only when all of its bytes are there (written aside, then renamed).
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

CHUNK = 1 << 20


class BadBytes(Exception):
    """The body isn't what its name or its Content-MD5 header promised."""


def hexadecimal(digest: str) -> str:
    """The hex form of a base64 md5."""
    return base64.b64decode(digest).hex()


def base64_md5(digest: str) -> str:
    """The base64 form of a hex md5."""
    return base64.b64encode(bytes.fromhex(digest)).decode()


class Storage:
    """The folders below `root`; kinds are blob, part, manifest and run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for kind in ("blob", "part", "manifest", "run", "incoming"):
            (root / kind).mkdir(parents=True, exist_ok=True)

    def path(self, kind: str, name: str) -> Path:
        """Where it lies; every name becomes one file name."""
        return self.root / kind / quote(name, safe="")

    def has(self, kind: str, name: str) -> bool:
        return self.path(kind, name).is_file()

    def write(self, kind: str, name: str, chunks: Iterable[bytes], md5: str | None) -> str:
        """Stores a body and returns its hex md5.

        Args:
            kind: blob, part, manifest or run.
            name: Of a blob its hex md5, which the bytes must have.
            chunks: The body.
            md5: What the sender says it is, base64.

        Raises:
            BadBytes: The bytes have another md5.
        """
        aside = self.root / "incoming" / secrets.token_hex(8)
        digest = hashlib.md5(usedforsecurity=False)
        try:
            with aside.open("wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
            found = digest.hexdigest()
            if kind == "blob" and found != name:
                raise BadBytes(f"blob {name} has md5 {found}")
            if md5 is not None and md5 != base64_md5(found):
                raise BadBytes(f"Content-MD5 {md5}, but the body has {base64_md5(found)}")
            aside.replace(self.path(kind, name))
        finally:
            aside.unlink(missing_ok=True)
        return found

    def join(self, upload: str, count: int, blob: str) -> None:
        """Makes a blob of the parts 1 to `count` of an upload; a second time it is there already.

        Raises:
            BadBytes: A part is missing, or the whole has another md5.
        """
        if self.has("blob", blob):
            return
        parts = [self.path("part", f"{upload}.{n}") for n in range(1, count + 1)]
        for n, part in enumerate(parts, 1):
            if not part.is_file():
                raise BadBytes(f"part {n} of {count} was not uploaded")
        self.write("blob", blob, (chunk for part in parts for chunk in chunks_of(part)), None)
        for part in parts:
            part.unlink(missing_ok=True)


def chunks_of(path: Path, start: int = 0, end: int | None = None) -> Iterable[bytes]:
    """The bytes from `start` up to `end`, never all of them in memory."""
    left = (path.stat().st_size if end is None else end) - start
    with path.open("rb") as file:
        file.seek(start, os.SEEK_SET)
        while left > 0 and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk
