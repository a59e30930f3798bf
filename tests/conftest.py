"""What all tests share: quiet, small, and apart from the user's own repo."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# What landed is judged by the same inputs every time; MODULELENS_FUZZ looks for new ones.
settings.register_profile("same", derandomize=True)
if "MODULELENS_FUZZ" not in os.environ:
    settings.load_profile("same")

# A shell starts what runs in its background deaf to Ctrl-C, which tests send to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Some tests fork, which a pool of threads does not survive; and bits depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def own_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points the default repo into the test's own folder."""
    monkeypatch.setenv("MODULELENS_REPO", str(tmp_path / "default-repo"))
    monkeypatch.delenv("MODULELENS_OUTPUT", raising=False)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Lets no test see random numbers that depend on the tests before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine has not got, and says so."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
