"""Runs an unchanged training script under a trace. The script does not know.

The model is not named by anybody: it is the largest module that is called outermost while the
warm-up steps pass (a loss is an outermost module too, and has no parameters).
"""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import difflib
import functools
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch
from torch import nn

from modulelens.capture.init import track_init
from modulelens.capture.keep import Keep
from modulelens.capture.select import check_steps
from modulelens.capture.trace import Trace
from modulelens.capture.wrappers import own_class, unwrap
from modulelens.cli.output import streams_kept
from modulelens.errors import ForeignError, ModuleLensError, NotFound

_module: Any = nn.Module
_call: Any = nn.Module.__call__
_OWN = ("modulelens", "runpy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """How a script is traced; the fields are those of `trace`.

    `model` is the class name of the model to trace; without it the largest. `as_module` is
    python's `-m`.
    """

    name: str | None = None
    modules: Sequence[str] = ("*",)
    methods: Sequence[str] = ()
    keep: Keep = dataclasses.field(default_factory=Keep)
    warmup: int = 1
    steps: int = 1
    as_module: bool = False
    model: str | None = None

    def __post_init__(self) -> None:
        check_steps(self.warmup, self.steps)  # before the script runs


def trace_script(script: str, argv: Sequence[str], options: ScriptOptions) -> Trace:
    """Runs the script to its end, as `python script.py ARGS` would, and traces one of its steps.

    Args:
        script: A file, or a module's name with `as_module`.
        argv: The script's own arguments.
        options: What to trace.

    Returns:
        The finished trace. When the script raises after its step was traced, that is a warning
        of the trace and its `failure`, and its traceback is printed.

    Raises:
        NotFound: There is no such script, it called no module with parameters, no model of that
            class, or too few steps.
        ForeignError: What the script raised before its step was traced; its traceback is printed.
        SystemExit: The script left before its step was traced.
    """
    check_script(script, options.as_module)
    watcher = _Watcher(options)
    failure: BaseException | None = None
    with _as_main(script, argv, options.as_module), track_init(), watcher:
        try:
            with _termination_raised(), _exit_raised(watcher), streams_kept():
                _run(script, options.as_module)
        except SystemExit as leave:
            failure = leave if leave.code not in (None, 0) else None
            watcher.end(failure)
        except BaseException as error:  # noqa: BLE001 - boundary: raised again, or reported
            failure = error
        if failure is not None and not watcher.traced:
            raise _reported(script, failure)
    trace = watcher.result()
    if failure is not None:
        _print_failure(failure)
        trace.failure = failure
        trace.warnings.append(f"the script ended by {type(failure).__name__} after the traced step")
    return trace


def check_script(script: str, as_module: bool) -> None:
    """Refuses a file that is not there.

    Raises:
        NotFound: There is none.
    """
    if not as_module and not Path(script).is_file():
        raise NotFound(f"no script {script}", hint="modulelens trace -- train.py ARGS")


def _reported(script: str, failure: BaseException) -> BaseException:
    """What to raise for a script's failure; that of its own code is printed as python would."""
    if isinstance(failure, ModuleLensError) or not isinstance(failure, Exception):
        return failure
    _print_failure(failure)
    kind = type(failure).__name__
    return ForeignError(
        f"{script} raised {kind} before a step was traced: {failure}",
        kind=kind,
        traceback="".join(traceback.format_exception(failure)),
        hint="its own traceback is on stderr; does it run without modulelens?",
    )


def _print_failure(failure: BaseException) -> None:
    """Prints the script's traceback, without the frames that ran the script."""
    frames = []
    link = failure.__traceback__
    while link is not None:
        if link.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN:
            frames.append(link)
        link = link.tb_next
    for frame in reversed(frames):
        link = TracebackType(link, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    sys.excepthook(type(failure), failure.with_traceback(link), link)


@contextmanager
def _exit_raised(watcher: _Watcher) -> Iterator[None]:
    """`os._exit` after the traced step, as scripts of many ranks end: what was traced is stored.

    Then the process ends in that way, past whatever else would run.
    """
    leave: Any = os._exit
    script = (os.getpid(), threading.get_ident())

    def leave_hard(code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        leave(code)

    def exit_(code: int) -> None:
        if not watcher.traced or (os.getpid(), threading.get_ident()) != script:
            leave(code)
        atexit.register(leave_hard, code)
        raise SystemExit(code)

    module: Any = os
    module._exit = exit_
    try:
        yield
    finally:
        module._exit = leave


@contextmanager
def _termination_raised() -> Iterator[None]:
    """A SIGTERM that nobody handles ends the script by `SystemExit`, so that its trace is kept."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    owner = os.getpid()

    def leave(number: int, _: FrameType | None) -> None:
        if os.getpid() == owner:
            raise SystemExit(128 + number)
        signal.signal(number, signal.SIG_DFL)  # a child of the script dies as it would have
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(script: str, as_module: bool) -> None:
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    # As python does it, unlike runpy: an absolute file, and the first argument as it was given.
    path = os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118 - as it is written
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module, before = ModuleType("__main__"), sys.modules["__main__"]
    vars(module).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    data = loader.get_data(path)
    code = pkgutil.read_code(io.BytesIO(data)) or loader.source_to_code(data, path)
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = before


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


def run_untraced(script: str, argv: Sequence[str], *, as_module: bool) -> None:
    """Runs the script as `python script.py ARGS` would; raises what it raises."""
    with _as_main(script, argv, as_module):
        _run(script, as_module)


class _Watcher:
    """Finds the model among the outermost calls, then lets a `Trace` take over.

    It stands in front of `nn.Module.__call__` until then, so that the very first step can be the
    traced one.
    """

    def __init__(self, options: ScriptOptions) -> None:
        self._options = options
        self._seen: dict[int, nn.Module] = {}
        self._counts: dict[int, int] = {}
        self._depth = 0
        self._trace: Trace | None = None
        self._ended = False
        self._refused: ModuleLensError | None = None

    @property
    def traced(self) -> bool:
        """Whether a step was traced whole."""
        return self._trace is not None and bool(self._trace.watches)

    def __enter__(self) -> _Watcher:
        watcher = self

        @functools.wraps(_call)
        def announced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return _call(module, *args, **kwargs)
            watcher._before(module)
            watcher._depth += 1
            # A trace that has just begun listens to the class.
            call = _call if watcher._trace is None else type(module).__call__
            try:
                return call(module, *args, **kwargs)
            finally:
                watcher._depth -= 1

        _module.__call__ = announced
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Ends the trace where one is going on; a step whose forward is over is kept."""
        _module.__call__ = _call
        if self._trace is not None and not self._ended:
            self._ended = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `result` says the same, as an error
                self._trace.__exit__(type(error) if error else None, error, None)

    def _before(self, module: nn.Module) -> None:
        if (
            self._depth
            or self._trace is not None
            or self._refused is not None
            or torch._C._current_graph_task_id() != -1
        ):
            return
        if next(module.parameters(), None) is None:
            return
        self._seen[id(module)] = module
        self._counts[id(module)] = self._counts.get(id(module), 0) + 1
        largest = max(self._wanted(), key=_size, default=None)
        if module is largest and self._counts[id(module)] > self._options.warmup:
            self._begin(module)

    def _wanted(self) -> list[nn.Module]:
        asked = self._options.model
        return [m for m in self._seen.values() if asked is None or _class_name(m) == asked]

    def _others(self, model: nn.Module) -> list[str]:
        """The class names of other outermost modules that were seen."""
        inside = {id(m) for m in model.modules()}
        return sorted({_class_name(m) for m in self._seen.values() if id(m) not in inside})

    def _begin(self, module: nn.Module) -> None:
        _module.__call__ = _call
        options = self._options
        others = ", ".join(self._others(module))
        try:
            trace = Trace(
                module,
                name=options.name or _class_name(module),
                modules=list(options.modules),
                methods=list(options.methods),
                keep=options.keep,
                steps=options.steps,
            )
        except ModuleLensError as error:
            if not isinstance(error, NotFound):
                self._refused = error
                if world_size() > 1:
                    return
                raise
            choose = f"; --model traces another model of the script: {others}" if others else ""
            self._refused = NotFound(
                f"{error.message} in {_class_name(module)}",
                hint=f"{error.hint}{choose}",
                did_you_mean=error.did_you_mean,
            )
            if world_size() > 1:  # other ranks wait for this one: it is said at the end
                return
            raise self._refused from None
        if others and options.model is None:
            trace.warnings.append(
                f"{_class_name(module)} was traced, the largest model of the script; --model "
                f"traces another one: {others}"
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
        if self._refused is not None:
            raise self._refused
        if self._trace is not None and self._trace.warnings:
            raise NotFound(f"no step was traced: {'; '.join(self._trace.warnings)}")
        if not self._seen:
            raise NotFound(
                "the script called no module with parameters", hint="does it train in a subprocess?"
            )
        wanted = self._wanted()
        if not wanted:
            names = sorted({_class_name(m) for m in self._seen.values()})
            raise NotFound(
                f"the script called no model of class {self._options.model} outermost",
                hint=f"--model takes one of {', '.join(names)}",
                did_you_mean=difflib.get_close_matches(str(self._options.model), names, n=3),
            )
        steps = max(self._counts[id(m)] for m in wanted)
        raise NotFound(
            f"the script ran {steps} step(s), warmup is {self._options.warmup}",
            hint="use --warmup 0",
        )


def world_size() -> int:
    """How many ranks the job has, as `torchrun` says."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def _class_name(module: nn.Module) -> str:
    return own_class(type(unwrap(module)[0])).__name__


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
