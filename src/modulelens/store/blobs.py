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
    *,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Stores buffers and returns their digests, in their order. Equal ones are written once.

    Args:
        layout: The repo.
        buffers: C-contiguous buffers of any format.
        progress: Called with the sizes of buffers that are stored, in this thread.

    Raises:
        DiskFull: No space is left; blobs stored so far stay until the next gc.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    digests = [""] * len(views)
    first: dict[str, int] = {}

    def put(numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            view = views[number]
            digest = digests[number] = digest_of(view)
            if first.setdefault(digest, number) == number:
                path = layout.blob(digest)
                # A file of another size is what a power cut or a crashed disk left.
                if size_of(path) != view.nbytes:
                    write_atomic(path, view, tmp=layout.tmp, mode=0o444)
            yield view.nbytes

    from concurrent.futures import ThreadPoolExecutor

    report = progress or (lambda _: None)
    # The largest first, so that the two threads end at about the same time.
    order = sorted(range(len(views)), key=lambda number: -views[number].nbytes)
    large = [number for number in order if views[number].nbytes > _ALONE_BYTES]
    waiting = iter(large)
    with space_for(f"{len(views)} blobs", layout.root, sum(view.nbytes for view in views)):
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(list, put(waiting)) if len(large) > 1 else None
            try:
                for size in put(chain(waiting, order[len(large) :])):
                    report(size)
            finally:
                deque(waiting, maxlen=0)  # a failure here stops the other thread
        for size in other.result() if other else ():
            report(size)
    return digests
