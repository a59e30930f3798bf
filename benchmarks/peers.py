"""Other tools that look into modules, on the benchmarks' model: `python benchmarks/peers.py NAME`.

Knows how each is switched on for everything that it can keep. One process measures one tool: some
patch torch and leave hooks behind. `pip install --group peers` gets them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from loop import Loop, Step, in_turns
from model_39m import training

NOT_INSTALLED = 5
_ROUNDS = 5


def _msprobe(task: str, loop: Loop, folder: Path) -> tuple[Step, Step]:
    """The traced step, and what it is compared with."""
    debugger_of = importlib.import_module("msprobe.pytorch").PrecisionDebugger
    config = folder / "config.json"
    asked = {"scope": [], "list": [], "data_mode": ["all"]}
    dump = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "L0"}
    config.write_text(json.dumps({**dump, task: asked}))
    debugger = debugger_of(config_path=str(config))

    def traced() -> None:
        debugger.start(model=loop.model)
        loop.step()
        debugger.stop()
        debugger.step()

    return traced, loop.step


def _torchlens(loop: Loop, folder: Path) -> tuple[Step, Step]:  # noqa: ARG001
    torchlens: Any = importlib.import_module("torchlens")
    return lambda: torchlens.trace(loop.model, list(loop.data)), loop.forward


def _transformers(loop: Loop, folder: Path) -> tuple[Step, Step]:
    utilities: Any = importlib.import_module("transformers.model_debugging_utils")
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def traced() -> None:
        with (
            tempfile.TemporaryDirectory(dir=folder) as place,
            utilities.model_addition_debugger_context(
                loop.model, debug_path=place, do_prune_layers=False, use_repr=False
            ),
        ):
            loop.forward()

    return traced, torch.no_grad()(loop.forward)


_PEERS: dict[str, tuple[Any, str]] = {
    "msprobe L0 tensor": (
        functools.partial(_msprobe, "tensor"),
        "of a step, written; inputs, outputs, gradients, parameters",
    ),
    "msprobe L0 statistics": (
        functools.partial(_msprobe, "statistics"),
        "of a step; statistics of the same",
    ),
    "torchlens trace": (_torchlens, "of a forward, not written; every op's output"),
    "transformers debugger": (
        _transformers,
        "of a forward without gradients, written; inputs and outputs",
    ),
}
NAMES = tuple(_PEERS)


def main(name: str) -> None:
    """Measures one tool; the last line is JSON."""
    torch.set_num_threads(1)
    measure, note = _PEERS[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                traced, plain = measure(training(False), Path(folder))
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            sys.exit(NOT_INSTALLED)
        with contextlib.redirect_stdout(io.StringIO()):
            pairs = in_turns(plain, traced, _ROUNDS)
    print(json.dumps({"cpu": pairs.cpu, "note": f"{note}; {pairs}"}))


if __name__ == "__main__":
    main(sys.argv[1])
