"""A watched session: counts steps, watches the chosen ones, and holds what was captured.

Knows when a step begins and ends. What happens inside one is `watch.py`'s.
"""

from __future__ import annotations

import datetime
import functools
import sys
import threading
import uuid
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from modulelens.capture.capture import Capture, captures_of, coverage_of, missed, unregistered
from modulelens.capture.gathered import flat_parameters
from modulelens.capture.hook import Undo, finish, guard_resizes, unseen
from modulelens.capture.keep import Keep
from modulelens.capture.methods import listen
from modulelens.capture.nodes import Nodes
from modulelens.capture.select import check_model, check_steps, select, select_methods
from modulelens.capture.snapshot import Snapshots
from modulelens.capture.watch import Watch
from modulelens.capture.wrappers import (
    is_compiled,
    is_ready,
    own_class,
    runs,
    schedules,
    unwrap,
)
from modulelens.environment import moment, read_environment
from modulelens.errors import Conflict, UsageError
from modulelens.records import CoverageList, Environment

_RAN_EAGERLY = (
    "the model is compiled and ran eagerly in the traced step: its random draws and last bits may"
    " differ from those of compiled code"
)
_MOST_MISSED = 8
_active: weakref.WeakKeyDictionary[nn.Module, Trace] = weakref.WeakKeyDictionary()


class Trace:
    """Watches a training loop and captures modules of `model` in one real step.

    A step is one outermost call of `model`, or of the pipeline schedule that calls it, up to the
    next one, the end of the optimizer's step, or the end of the block. The step's loss, gradients
    and random streams are the same as without it. When `warmup + steps` steps are over nothing is
    installed any more.

    Args:
        model: The module that the training loop calls; wrappers (compile, DDP) are seen through.
        name: What the model is called in the repo; its class name by default.
        modules: Globs over fqns (`"layers.*.attn"`) or class names (`"Linear"`).
        methods: Methods whose calls are recorded besides those of `forward` (`["encode"]`), on
            every module asked for that has them. On the model itself they are steps as well.
        keep: What to keep; everything that a bit-equal rebuild needs by default.
        warmup: Steps to let pass first.
        steps: Steps to trace.
        push: A remote's URL (`wandb://entity/registry`): when the block ends, what was captured is
            added to `ml.Repo()`, and a process in the background verifies it and sends it there.

    Attributes:
        captures: One `Capture` per module that was called, in the order of `named_modules`.
        coverage: The fate of every requested module.
        warnings: What went otherwise than asked; every entry carries them.
        failure: What a script that was traced ended by, after its traced step.
        done: Whether all steps asked for were traced; from then on nothing is installed.

    Raises:
        UsageError: `model` is no module, or a number is out of range.
        NotFound: A pattern in `modules` matches nothing, or no module has one of `methods`.
        Conflict: The model is being traced already.

    Example:
        >>> with ml.trace(model, name="dlrm") as trace:
        ...     for batch in loader:
        ...         train_step(batch)
        ...         if trace.done:
        ...             break
        >>> repo.add(trace)
    """

    def __init__(  # noqa: PLR0913  the parameters are what a user may ask for
        self,
        model: nn.Module,
        *,
        name: str | None = None,
        modules: str | Sequence[str] = "*",
        methods: Sequence[str] = (),
        keep: Keep | None = None,
        warmup: int = 0,
        steps: int = 1,
        push: str | None = None,
    ) -> None:
        check_model(model)
        if push is not None:
            _keeper().check(push)
        self.push = push
        check_steps(warmup, steps)
        if not (name is None or isinstance(name, str)):
            raise UsageError(f"name={name!r}: a text, or None for the class's name")
        if not (keep is None or isinstance(keep, Keep)):
            raise UsageError(f"keep={keep!r}: use ml.Keep(...)")
        self.model, self.wrappers = unwrap(model)
        own_name = own_class(type(self.model)).__name__
        self.name = str.__str__(name or own_name)  # a subclass is no plain text
        self._paths = {id(module): fqn for fqn, module in model.named_modules()}
        self.keep = keep or Keep()
        self.warmup = warmup
        self.steps = steps
        self.id = uuid.uuid4().hex[:12]
        self.created = ""
        self.captures: list[Capture] = []
        self.coverage = CoverageList()
        self.warnings: list[str] = []
        self.failure: BaseException | None = None
        self.done = False
        self.snapshots = Snapshots()
        self._own_hooks: set[int] = set()
        self.nodes = Nodes(self.model, self.snapshots, self._own_hooks, flat_parameters(model))
        self.patterns = modules
        self.targets = select(self.nodes.fqns, self.nodes.modules, modules)
        inside = {n for lookup in self.nodes.lookups for n in self.nodes.subtree(lookup)[1:]}
        self.targets = [number for number in self.targets if number not in inside]
        self.methods = select_methods(self.nodes.modules, self.targets, methods)
        self.watches: list[Watch] = []
        self._outer = model
        self.first_step = 0
        self.moment = 0
        self._seen_steps = 0
        self._watch: Watch | None = None
        self._inside = 0
        self._since = ""
        self._lock = threading.RLock()
        self._undo = Undo()
        self._steps_read: int | None = None
        self.environment: Environment | None = None
        self.main_file = ""

    def __enter__(self) -> Trace:
        frame = sys._getframe(1)
        if self._outer in _active:
            raise Conflict(
                f"this model is being traced already (since {_active[self._outer]._since})",
                hint="leave that `with ml.trace(...)` block first; `ml.end_traces()` ends them all",
            )
        try:
            self._since = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            _active[self._outer] = self
            self.environment = read_environment()
            main = getattr(sys.modules.get("__main__"), "__file__", None)
            self.main_file = str(Path(main).resolve()) if main else ""
            now = datetime.datetime.now(datetime.timezone.utc)
            self.created = now.isoformat(timespec="seconds")
            listen(self._undo, type(self._outer), "__call__", self)
            for method in self.methods.get(0, ()):
                listen(self._undo, type(self.model), method, self)
            for cls in schedules():
                listen(self._undo, cls, "step", self)
        except BaseException:
            finish(self._stop)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        finish(lambda: self._end(error))
        if kind is None and not self.watches:
            compiled = "torch._dynamo" in sys.modules
            why = " (is it called through a compiled wrapper? trace that one)" if compiled else ""
            seen = f"{self._seen_steps} step(s) were seen, warmup is {self.warmup}"
            warnings.warn(f"no step of {self.name} was traced: {seen}{why}", stacklevel=2)
        elif self.push and self.captures:
            _keeper().keep(self)

    def _end(self, error: BaseException | None) -> None:
        self._end_step(error)
        self._stop()

    # ---- listening for the outermost calls of the model

    def called(self, module: nn.Module, method: str, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """A call of the model begins; the outermost one begins a step."""
        if not self._hears(module):
            return
        with self._lock:  # threads may call it at once
            self._inside += 1
            if self._inside > 1:
                return
            finish(self._end_step)
            if self.done:
                return
            self._seen_steps += 1
            if self._seen_steps > self.warmup and is_ready(module):
                self._begin_step()

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        """A call of the model ended."""
        if self._hears(module):
            with self._lock:
                self._inside = max(self._inside - 1, 0)
                if not self._inside and self._watch is not None:
                    self._watch.release()

    def raised(self, module: nn.Module, error: BaseException) -> None:
        """A call of the model raised; the user may catch that and try again with the next batch."""
        if not self._hears(module):
            return
        with self._lock:
            if self._inside <= 1:
                finish(lambda: self._end_step(error))
            self._inside = max(self._inside - 1, 0)

    def _hears(self, module: nn.Module) -> bool:
        # A call within backward runs the forward again, under a checkpoint.
        mine = module is self._outer or module is self.model or runs(module, self.model)
        return mine and torch._C._current_graph_task_id() == -1

    def wrapped_path(self, number: int) -> str:
        """A module's path in the model as it was given; empty where it is its fqn."""
        nodes = self.nodes
        live, fqn = nodes.live.get(number, nodes.modules[number]), nodes.fqns[number]
        outside = self._paths.get(id(self.model), "")
        path = self._paths.get(id(live), ".".join(filter(None, (outside, fqn))))
        return path if path != fqn else ""

    def _begin_step(self) -> None:
        watch = Watch(
            self.nodes, self.targets, self.keep, self.snapshots, len(self.watches), self.methods
        )
        self._watch = watch
        try:
            if not self.watches:
                self.moment = moment()
                shared = Undo()
                weakref.finalize(self.snapshots, shared.run)
                guard_resizes(shared)
            unseen(watch.install, self._on_optimizer_step)
        except Exception as error:  # noqa: BLE001 - boundary: the user's step goes on without us
            self._watch = None
            watch.remove()
            self.warnings.append(f"a step was not watched: {type(error).__name__}: {error}")

    def _on_optimizer_step(self, optimizer: Any) -> None:
        if self._watch is None or self._inside or torch._C._current_graph_task_id() != -1:
            return
        mine = {id(p) for p in self.model.parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            finish(self._end_step)

    def _end_step(self, error: BaseException | None = None) -> None:
        watch = self._watch
        if watch is None:
            return
        watch.remove()
        self._watch = None
        if error is not None and self._inside:
            self.warnings.append(f"step aborted: {type(error).__name__}; nothing of it is kept")
        else:
            if error is not None:
                self.warnings.append(f"step ended by {type(error).__name__}")
            self.watches.append(watch)
            if len(self.watches) == 1:
                self.first_step = self._seen_steps - 1
                if is_compiled(self._outer):
                    self.warnings.append(_RAN_EAGERLY)
        if len(self.watches) >= self.steps:
            self._stop()

    def _stop(self) -> None:
        self.done = len(self.watches) >= self.steps
        self._undo.run()
        _active.pop(self._outer, None)
        if self._steps_read == len(self.watches):
            return  # read when the last step ended; its gradients may be gone by now
        try:
            self.nodes.fill_shards()
            self.captures = captures_of(self)
            self.coverage = coverage_of(self)
            self.warnings += missed(self)[:_MOST_MISSED]
            if self.watches and (loose := unregistered(self.model)):
                names = ", ".join(loose[:8])
                self.warnings.append(f"not registered, so kept within their owner only: {names}")
        except Exception as error:  # noqa: BLE001 - boundary: runs inside the user's optimizer step
            self.warnings.append(f"the trace cannot be read: {type(error).__name__}: {error}")
        self._steps_read = len(self.watches)
        self.snapshots.forget_live()
        self.nodes.forget_live()


def end_traces() -> None:
    """Ends every trace that is going on, such as one that a notebook's cell left open."""
    for active in list(_active.values()):
        finish(functools.partial(active._end, None))


class Keeper(Protocol):
    """Stores traces and pushes them: capturing itself knows no disk."""

    def check(self, push: str) -> None:
        """Raises UsageError where `push` is not the URL of a remote."""

    def keep(self, trace: Trace) -> None:
        """Stores what was captured, and sends it."""


def _keeper() -> Keeper:
    if not keepers:
        raise UsageError("push= is for `ml.trace`", hint="import modulelens as ml; ml.trace(...)")
    return keepers[0]


keepers: list[Keeper] = []
#: Makes a `Trace`, to be used in a `with` statement.
trace = Trace
