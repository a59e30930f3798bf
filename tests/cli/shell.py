"""Runs the command line as a user does: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The envelope; stdout has to hold nothing else."""
        answer = json.loads(self.out)
        assert isinstance(answer, dict)
        return answer


def modulelens(*words: str, cwd: Path | None = None, **environment: str) -> Done:
    """`python -m modulelens WORDS`, without a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "modulelens", *words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)
