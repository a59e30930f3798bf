"""A process that forks pushes to be killed: `python -m tests.remote.kill_push`, orders on stdin.

An order is `REPO URL`; the answer is the push's process id when it begins, then "done" or "error
TEXT" when it ends by itself. After one more line it is reaped, and the answer is "ended". This
process has one thread when it forks, as no test process has.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import s3fs  # noqa: F401  imported once, not by each push

from modulelens.store import LocalStore
from modulelens.store.remote import folder, packs, push, registry  # noqa: F401


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def work(root: str, url: str) -> None:
    store = LocalStore(Path(root))
    entries = [store.metadata(row.id) for row in store.find()]
    say(os.getpid())
    done = push.send(store, url, entries, tries=1)
    assert done.waiting == 0, done
    assert not done.failed, done
    say("done")


if __name__ == "__main__":
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            try:
                work(*line.split())
            except BaseException as error:  # noqa: BLE001  told, and never back into the loop
                traceback.print_exc()
                say(f"error {error!r}")
            os._exit(0)
        sys.stdin.readline()
        os.waitpid(child, 0)
        say("ended")
