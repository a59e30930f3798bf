"""A progress bar for long work: on stderr, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Gives a callable for `(done, total)` in any unit, the total None where it is not known.

    Nothing is drawn off a terminal. Not for timed work: the bar's own thread would disturb it.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
