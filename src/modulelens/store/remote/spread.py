"""The same action on many items, in threads: the first failure, or Ctrl-C, ends it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def spread(action: Callable[[T], R], items: Iterable[T], threads: int = 16) -> list[R]:
    """What the action gives for each item, in their order; raises what the first failure raised.

    After a failure it waits for what runs; Ctrl-C does not: what runs then ends by itself.
    """
    items = list(items)
    if len(items) < 2:
        return [action(item) for item in items]
    waiting = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while waiting and not errors:
            try:
                number, item = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                results[number] = action(item)
            except BaseException as error:  # noqa: BLE001  raised again below
                errors[number] = error

    # Daemons: those of a pool keep the process alive until a remote that hangs has answered.
    workers = [threading.Thread(target=work, daemon=True) for _ in items[:threads]]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(1.0)  # a Ctrl-C that comes just before it sleeps does not wake it
    finally:
        waiting.clear()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(items))]
