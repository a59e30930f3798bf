"""Blobs: raw bytes named by their digest. Knows nothing of tensors, nodes or entries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from modulelens.errors import NotFound
from modulelens.store.files import (
    Verified,
    digest_of,
    read_regular,
    space_for,
    temporary,
    write_new,
)
from modulelens.store.layout import Layout

#: One hashes while the other writes; both release the GIL.
_THREADS = 2
#: Below this many bytes the threads cost more than they gain.
_INLINE_BYTES = 1 << 18


def put_blobs(
    layout: Layout,
    buffers: Sequence[bytes | memoryview],
    *,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Stores buffers and returns their digests, in their order. Equal ones are written once.

    Args:
        layout: The repo.
        buffers: C-contiguous buffers of any format.
        progress: Called with the size of each buffer once it is stored, in this thread.

    Raises:
        DiskFull: No space is left; blobs stored so far stay until the next gc.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    total = sum(view.nbytes for view in views)
    writer = _Writer(layout)
    digests = [""] * len(views)
    with space_for(f"{len(views)} blobs", layout.root, total):
        if total <= _INLINE_BYTES:
            for number, view in enumerate(views):
                digests[number] = writer.put(view)
                if progress:
                    progress(view.nbytes)
            return digests
        from concurrent.futures import ThreadPoolExecutor, as_completed

        pool = ThreadPoolExecutor(_THREADS)
        try:
            # The largest first, so that the threads end at about the same time.
            order = sorted(range(len(views)), key=lambda number: -views[number].nbytes)
            jobs = {pool.submit(writer.put, views[number]): number for number in order}
            for job in as_completed(jobs):
                digests[jobs[job]] = job.result()
                if progress:
                    progress(views[jobs[job]].nbytes)
        finally:
            pool.shutdown(cancel_futures=True)
    return digests


class _Writer:
    """Writes the blobs of one call; several threads use it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._mutex = threading.Lock()
        self._taken: set[str] = set()

    def put(self, view: memoryview) -> str:
        digest = digest_of(view)
        with self._mutex:
            if digest in self._taken:
                return digest
            self._taken.add(digest)
        path = self._layout.blob(digest)
        if not _is_stored(path, view.nbytes):
            draft = temporary(self._layout.tmp)
            write_new(draft, view, mode=0o444)
            try:
                path.parent.mkdir(exist_ok=True)
                draft.replace(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        return digest


def _is_stored(path: Path, size: int) -> bool:
    # A file of another size is what a power cut or a crashed disk left: it is written again.
    try:
        return path.lstat().st_size == size
    except FileNotFoundError:
        return False


def blob_path(layout: Layout, digest: str, verified: Verified | None) -> Path:
    """Path of a blob that exists; its bytes are checked unless `verified` is None.

    Raises:
        NotFound: No such blob, or no digest at all.
        Corrupted: The bytes differ from the digest, or the blob is a symbolic link.
    """
    path = layout.blob(digest)
    if not path.exists():
        raise NotFound(
            f"no blob {digest} in {layout.root}", hint="`modulelens fsck` names the entries"
        )
    if verified is not None:
        verified.check(path, digest, what=f"blob {digest[:16]}...")
    return path


def blob_bytes(layout: Layout, digest: str, verified: Verified) -> bytes:
    """The bytes of a blob, checked.

    Raises:
        NotFound: No such blob.
        Corrupted: The bytes differ from the digest.
    """
    return read_regular(blob_path(layout, digest, verified))
