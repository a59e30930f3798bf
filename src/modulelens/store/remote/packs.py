"""Which blobs travel together: those that the same entries need, so that none comes in vain.

A file per blob would be thousands of requests; a file per capture would be fetched for one leaf.
A large blob is alone, so that weights that a later capture shares are there already.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from modulelens.errors import Corrupted
from modulelens.records import Metadata
from modulelens.store.files import digest_of, digest_of_file
from modulelens.store.remote.seam import Pack

MOST_BYTES = 64 << 20
_ALONE_BYTES = 4 << 20


def plan(records: Sequence[Metadata], most_bytes: int = MOST_BYTES) -> list[dict[str, int]]:
    """Groups of blobs, digest -> size, in the order of the records."""
    users: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for number, record in enumerate(records):
        for digest, size in record.blobs.items():
            users[digest] = users.get(digest, 0) | 1 << number
            sizes[digest] = size
    groups: dict[int | str, list[dict[str, int]]] = {}
    for digest, size in sizes.items():
        key = users[digest] if size < _ALONE_BYTES else digest
        groups.setdefault(key, []).append({digest: size})
    return [
        {digest: size for blob in part for digest, size in blob.items()}
        for blobs in groups.values()
        for part in bundles(blobs, most_bytes)
    ]


def bundles(groups: Iterable[dict[str, int]], most_bytes: int) -> Iterator[list[dict[str, int]]]:
    """The groups in lists of at most so many bytes, each of one group at least."""
    bundle: list[dict[str, int]] = []
    total = 0
    for group in groups:
        size = sum(group.values())
        if bundle and total + size > most_bytes:
            yield bundle
            bundle, total = [], 0
        bundle.append(group)
        total += size
    if bundle:
        yield bundle


def write(blobs: dict[str, int], path_of: Callable[[str], Path], folder: Path) -> tuple[Path, Pack]:
    """Writes the file of a pack under its name; a blob alone is its own pack, and linked.

    Args:
        blobs: Digests and sizes, in order.
        path_of: The verified file of a blob.
        folder: Where the file comes to lie.
    """
    if len(blobs) == 1:
        (name,) = blobs
        source, path = path_of(name), folder / name
        try:
            path.hardlink_to(source)
        except FileExistsError:
            pass
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, path)
        return path, Pack(name, dict(blobs))
    draft = folder / "draft"
    with draft.open("wb") as file:
        for digest in blobs:
            with path_of(digest).open("rb") as part:
                shutil.copyfileobj(part, file)
    pack = Pack(digest_of_file(draft), dict(blobs))
    return draft.rename(folder / pack.name), pack


def blobs_in(path: Path, pack: Pack) -> Iterator[memoryview]:
    """The blobs of a pack's file, each checked against its digest.

    Raises:
        Corrupted: The file is not the pack, or holds something else than it says.
    """
    if not path.is_file() or path.is_symlink() or path.stat().st_size != pack.nbytes:
        raise Corrupted(f"pack {pack.name} came incomplete", hint="pull again")
    if digest_of_file(path) != pack.name:
        raise Corrupted(f"pack {pack.name} came with other bytes", hint="pull again")
    data = memoryview(b"")
    if pack.nbytes:  # mapped, not read: a blob alone may be larger than the memory
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for digest, size in pack.blobs.items():
        if digest_of(data[:size]) != digest:
            raise Corrupted(f"pack {pack.name} holds another blob than {digest}")
        yield data[:size]
        data = data[size:]
