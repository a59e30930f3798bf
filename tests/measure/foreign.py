"""Functions that a worker is asked to run; each misbehaves in one way."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from modulelens.errors import NotFound

calls = 0


def add(a, b):
    return {"sum": a + b}


def count():
    global calls  # noqa: PLW0603 - what this function is for
    calls += 1
    return calls


def endless():
    while True:
        pass


def sleeps():
    time.sleep(60)


def exits(code):
    os._exit(code)


def leaves():
    sys.exit(3)


def segfaults():
    ctypes.string_at(0)


def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def prints(text):
    print(text)  # noqa: T201
    os.write(2, b"raw bytes on stderr\n")
    return len(text)


def raises(message):
    raise ValueError(message)


def not_found():
    raise NotFound("no such thing", hint="look elsewhere")


def not_json():
    import torch

    return torch.ones(1)


def eats_memory():
    import torch

    return float(torch.ones(500_000_000).sum())


def threads():
    import torch

    # Large enough for torch to use its thread pool.
    torch.randn(300, 300) @ torch.randn(300, 300)
    return [torch.ones(1_000_000).sum().item(), torch.get_num_threads()]


def closes_everything():
    os.closerange(3, 256)
    return 1


def leaves_a_child_behind():
    child = subprocess.Popen(["sleep", "60"], start_new_session=False, close_fds=False)
    os.write(1, f"{child.pid}\n".encode())
    os._exit(0)


def answers_with_a_child():
    return subprocess.Popen(["sleep", "60"]).pid


def prints_endlessly():
    while True:
        print("x" * 10_000)  # noqa: T201


def limits():
    return [
        int(Path("/proc/self/oom_score_adj").read_text()),
        resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY,
    ]
