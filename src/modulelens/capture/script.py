"""Runs an unchanged training script under a trace. The script does not know.

The model is not named by anybody: it is the largest module that is called outermost while the
warm-up steps pass (a loss is an outermost module too, and has no parameters).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modulelens.capture.init import track_init
from modulelens.capture.keep import Keep
from modulelens.capture.select import unwrap
from modulelens.capture.trace import Trace
from modulelens.errors import NotFound

_module: Any = nn.Module
_call: Any = nn.Module.__call__


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """How a script is traced; the fields are those of `trace`, and `as_module` is python's `-m`."""

    name: str | None = None
    modules: Sequence[str] = ("*",)
    keep: Keep = dataclasses.field(default_factory=Keep)
    warmup: int = 1
    steps: int = 1
    as_module: bool = False


def trace_script(script: str, argv: Sequence[str], options: ScriptOptions) -> Trace:
    """Runs the script to its end, as `python script.py ARGS` would, and traces one of its steps.

    Args:
        script: A file, or a module's name with `as_module`.
        argv: The script's own arguments.
        options: What to trace.

    Returns:
        The finished trace. When the script raises after its step was traced, that is a warning
        of the trace, and its traceback is printed.

    Raises:
        NotFound: There is no such script, it called no module with parameters, or too few steps.
        BaseException: What the script raised before its step was traced, unchanged.
    """
    if not options.as_module and not Path(script).is_file():
        raise NotFound(f"no script {script}", hint="modulelens trace -- train.py ARGS")
    watcher = _Watcher(options)
    failure: BaseException | None = None
    with _as_main(script, argv, options.as_module), track_init(), watcher:
        try:
            _run(script, options.as_module)
        except SystemExit as leave:
            failure = leave if leave.code not in (None, 0) else None
        except BaseException as error:  # noqa: BLE001 - boundary: raised again, or reported
            failure = error
        if failure is not None and not watcher.traced:
            raise failure
    trace = watcher.result()
    if failure is not None:
        sys.excepthook(type(failure), failure, failure.__traceback__)
        trace.warnings.append(f"the script ended by {type(failure).__name__} after the traced step")
    return trace


def _run(script: str, as_module: bool) -> None:
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


@contextmanager
def _as_main(script: str, argv: Sequence[str], as_module: bool) -> Iterator[None]:
    """Arguments and import path as the script would find them."""
    saved = sys.argv, list(sys.path)
    sys.argv = [script, *argv]
    sys.path.insert(0, os.getcwd() if as_module else str(Path(script).resolve().parent))  # noqa: PTH109
    try:
        yield
    finally:
        sys.argv, sys.path[:] = saved


class _Watcher:
    """Finds the model among the outermost calls, then lets a `Trace` take over.

    It stands in front of `nn.Module.__call__` until then: a trace that begins there is in place
    before the call looks for hooks, so the very first step can be the traced one.
    """

    def __init__(self, options: ScriptOptions) -> None:
        self._options = options
        self._seen: dict[int, nn.Module] = {}
        self._counts: dict[int, int] = {}
        self._depth = 0
        self._trace: Trace | None = None

    @property
    def traced(self) -> bool:
        """Whether a step was traced whole."""
        return self._trace is not None and bool(self._trace.watches)

    def __enter__(self) -> _Watcher:
        watcher = self

        @functools.wraps(_call)
        def announced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watcher._before(module)
            watcher._depth += 1
            try:
                return _call(module, *args, **kwargs)
            finally:
                watcher._depth -= 1

        _module.__call__ = announced
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        _module.__call__ = _call
        if self._trace is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `result` says the same, as an error
                self._trace.__exit__(kind, error, None)

    def _before(self, module: nn.Module) -> None:
        if self._depth or self._trace is not None or torch._C._current_graph_task_id() != -1:
            return
        if next(module.parameters(), None) is None:
            return
        self._seen[id(module)] = module
        self._counts[id(module)] = self._counts.get(id(module), 0) + 1
        largest = max(self._seen.values(), key=lambda m: sum(p.numel() for p in m.parameters()))
        if module is largest and self._counts[id(module)] > self._options.warmup:
            self._begin(module)

    def _begin(self, module: nn.Module) -> None:
        _module.__call__ = _call
        options = self._options
        trace = Trace(
            module,
            name=options.name or type(unwrap(module)[0]).__name__,
            modules=list(options.modules),
            keep=options.keep,
            steps=options.steps,
        )
        trace._seen_steps = self._counts[id(module)] - 1
        self._trace = trace.__enter__()

    def result(self) -> Trace:
        """The finished trace.

        Raises:
            NotFound: Nothing was traced.
        """
        if self._trace is not None and self._trace.watches:
            return self._trace
        if not self._seen:
            raise NotFound(
                "the script called no module with parameters", hint="does it train in a subprocess?"
            )
        steps = max(self._counts.values())
        raise NotFound(
            f"the script ran {steps} step(s), warmup is {self._options.warmup}",
            hint="use --warmup 0",
        )
