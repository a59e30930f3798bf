"""A push beside the training: a process of its own that takes what the machine has left.

It outlives the process that starts it, and writes what it does to `outbox.log` in the repo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from modulelens.records import Metadata
from modulelens.store.local import LocalStore
from modulelens.store.remote import checked
from modulelens.store.remote.outbox import Outbox

#: Least of all: training threads get the processor whenever they want it.
NICE = 19
#: The pauses between them double up to a minute: about a quarter of an hour.
_TRIES = "20"


def start(
    store: LocalStore, remote: str, records: Sequence[Metadata], *, again: bool = False
) -> int:
    """Puts entries into the outbox and starts who drains it; returns the id of that process."""
    remote = checked(remote)
    Outbox(store.outbox_path).ask(remote, records, again=again)
    words = ["push", remote, "--queued", "--verify", "--tries", _TRIES, "--repo", str(store.root)]
    # The service of a run that is going on is that run's: the worker starts its own.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_SERVICE")}
    log = str(store.root / "outbox.log")
    # Not `subprocess`: nobody waits for it, and it is not to end with this process's terminal.
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "modulelens", *words],
        kept | {"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=0,
    )


def step_back() -> None:
    """Lets all other processes go first."""
    with suppress(OSError):
        os.nice(NICE)
