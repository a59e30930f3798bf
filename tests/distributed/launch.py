"""Starts jobs of several ranks on this machine, and ends what does not end by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(ranks: int, *words: str | Path, timeout_s: float = 170.0) -> str:
    """Runs `torchrun --nproc-per-node RANKS WORDS`; its output. Fails the test when it fails."""
    done = started(ranks, *words, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def started(
    ranks: int, *words: str | Path, timeout_s: float = 170.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """The same, however it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *map(str, words)]
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | own | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, _ = job.communicate()
        raise AssertionError(f"the job hangs:\n{out[-6000:]}") from None
    return subprocess.CompletedProcess(command, job.returncode, out)
