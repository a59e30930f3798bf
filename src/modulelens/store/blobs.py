"""Puts blobs: raw bytes named by their digest. Knows nothing of tensors, nodes or entries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from modulelens.store.files import digest_of, size_of, space_for, write_atomic
from modulelens.store.layout import Layout

#: Below this many bytes a second thread costs more than it gains.
_ALONE_BYTES = 1 << 17


def put_blobs(
    layout: Layout,
    buffers: Sequence[bytes | memoryview],
    progress: Callable[[int], None] | None = None,
) -> tuple[list[str], Callable[[], None]]:
    """Digests of buffers, in their order, and what has to be called until they are stored.

    Another thread writes them meanwhile. Equal ones are written once.

    Args:
        layout: The repo.
        buffers: C-contiguous buffers of any format.
        progress: Called with the sizes of buffers that are stored, in the thread that finishes.

    Raises:
        DiskFull: When finishing: no space is left; blobs stored so far stay until the next gc.
    """
    from concurrent.futures import ThreadPoolExecutor

    report = progress or (lambda _: None)
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    digests = [""] * len(views)
    # The largest first, so that two threads end at about the same time.
    order = sorted(range(len(views)), key=lambda number: -views[number].nbytes)
    large = [number for number in order if views[number].nbytes > _ALONE_BYTES]
    small = order[len(large) :]
    pool = ThreadPoolExecutor(1)

    def digest(numbers: Iterable[int]) -> None:
        for number in numbers:
            digests[number] = digest_of(views[number])

    def write(numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            path, view = layout.blob(digests[number]), views[number]
            # A file of another size is what a power cut or a crashed disk left.
            if first[digests[number]] == number and size_of(path) != view.nbytes:
                write_atomic(path, view, tmp=layout.tmp, mode=0o444)
            yield view.nbytes

    waiting = iter(large)
    hashing = pool.submit(digest, waiting) if large else None
    digest(chain(waiting, small))
    if hashing:
        hashing.result()
    first = {digest: number for number, digest in reversed(list(enumerate(digests)))}
    unwritten = iter(large)
    writing = pool.submit(list, write(unwritten)) if large else None

    def finish() -> None:
        total = sum(view.nbytes for view in views)
        with space_for(f"{len(views)} blobs", layout.root, total), pool:
            try:
                # The other thread has begun with the large ones; the rest of them is shared.
                for size in write(chain(small, unwritten)):
                    report(size)
            finally:
                deque(unwritten, maxlen=0)  # a failure here stops the other thread
            for size in writing.result() if writing else ():
                report(size)

    return digests, finish
