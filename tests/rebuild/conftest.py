"""Another process, warm, in which each call starts clean: no user module is imported there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modulelens.measure.worker import Worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    with Worker(path=[str(ROOT)], timeout_s=60, preload=("torch", "modulelens.replay")) as made:
        yield made


@pytest.fixture
def elsewhere(worker: Worker) -> Callable[..., Any]:
    """`elsewhere(function, **args)` runs a function of `tests.rebuild.elsewhere` over there."""
    return lambda name, **args: worker.call(f"tests.rebuild.elsewhere:{name}", args)
