"""Watches one step: what it installs it removes, and each call becomes a record.

The order of hooks is what makes a call right: ours is the last pre-hook and the first post-hook,
so it sees the pure forward without foreign hooks. Modules without foreign pre-hooks are seen by
one global hook, which leaves torch's fused fast paths on and nothing in the modules but a mark.
Nothing here may raise into the user's code: a failure becomes the module's fate.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from modulelens.capture.beside import Beside
from modulelens.capture.gradients import Gradients
from modulelens.capture.hook import (
    OwnHook,
    OwnId,
    Undo,
    hook_gradient,
    put_hook,
    run_eagerly,
    unseen,
    wrap_function,
)
from modulelens.capture.keep import Keep
from modulelens.capture.lookups import Lookups, large_tables
from modulelens.capture.methods import listen
from modulelens.capture.nodes import Nodes, has_weight_hooks
from modulelens.capture.seen import OUTSIDE, SeenCall
from modulelens.capture.snapshot import Snapshots
from modulelens.context import AmbientWatch, RngWatch
from modulelens.records import TensorRef
from modulelens.tree import Encoder
from modulelens.tree.shards import is_part

_C: Any = torch._C
_TRANSFORMED = "called inside a transform of torch.func, whose tensors hold no values of their own"
_GRAPHED = "called while a CUDA graph is captured, where nothing may be copied; trace without it"
_FIRES_TWICE = "Using `torch.compile.module.` when there are"


class Watch:
    """One step under observation.

    Args:
        nodes: The model's modules.
        targets: Numbers of the modules to record.
        keep: What to keep.
        snapshots: Takes the tensors.
        step: The step's number within the trace.
        methods: Per target, names of methods to record besides `forward`.
    """

    def __init__(
        self,
        nodes: Nodes,
        targets: Iterable[int],
        keep: Keep,
        snapshots: Snapshots,
        step: int,
        methods: Mapping[int, Sequence[str]],
    ) -> None:
        self.nodes = nodes
        self.methods = methods
        self.keep = keep
        self.snapshots = snapshots
        self.step = step
        self.targets = frozenset(targets)
        self.calls: list[SeenCall] = []
        self.counts: dict[int, int] = dict.fromkeys(self.targets, 0)
        self.recomputes: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self.grad_places: dict[tuple[int, str], dict[int, None]] = {}
        self._hooked: dict[int, Tensor] = {}
        self._sharded = bool(nodes.flat)
        self._ended = False
        # A table in parts fills other caches of its features than a whole one does.
        spread = nodes.collections.keys() | nodes.lookups.keys()
        self._spread = {n for n in targets if spread and spread & {*nodes.subtree(n)}}
        self._own_hooks = nodes._own_hooks
        self._stacks: dict[int, list[tuple[int, int, SeenCall | None, int]]] = {}
        self._rng, self._ambient = RngWatch(), AmbientWatch()
        self._undo = Undo()
        # Threads may call the model at once, and backward runs in threads of its own.
        self._lock = threading.RLock()
        self._deferred: set[int] = set()
        self._lookups = Lookups(snapshots, (), self._lock)
        self.gradients = Gradients(snapshots.ref, self._undo, self._lock)
        self._first = len(snapshots.taken)

    # ---- install and remove

    def install(self, on_optimizer_step: Callable[[Any], None]) -> None:
        """Installs everything. `on_optimizer_step` gets each optimizer that stepped."""
        if "torch._dynamo" in sys.modules:
            # Compiled code calls no hooks; eager does, and the compiled code is kept for later.
            run_eagerly(self._undo)
            # Compiled modules warn at a global hook that it may fire twice; ours knows its modules.
            self._undo.add(_unhush)
            warnings.filterwarnings("ignore", message=_FIRES_TWICE)
        hooks, after = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
        before = put_hook(self._undo, hooks, self._enter_any)
        with_kwargs = torch_module._global_forward_hooks_with_kwargs
        self._own_hooks |= {before, put_hook(self._undo, after, self._exit_any, with_kwargs)}
        for number in self.targets:
            self._mark(number, before)
            for method in self.methods.get(number, ()):
                listen(self._undo, type(self.nodes.modules[number]), method, self)
        stepped: Any = torch_optimizer._global_optimizer_post_hooks
        put_hook(self._undo, stepped, lambda optimizer, *_: on_optimizer_step(optimizer))
        wrap_function(self._undo, "ctc_loss", functools.partial(_unshared, self.snapshots))
        noted = self.targets.union(*map(self.nodes.subtree, self.targets))
        if self.keep.embedding_rows == "touched":
            modules = self.nodes.modules
            tables = large_tables((modules[number] for number in noted), modules)
            self._lookups = Lookups(self.snapshots, tables, self._lock)
            self._lookups.install(self._undo)
        owners = (self.nodes.lookups[n][0] for n in noted & self.nodes.lookups.keys())
        self._note_tables(noted.union(owners))
        self.nodes.note(sorted(noted))
        if self.keep.grads:
            self._watch_parameters(noted)
        if torch.is_grad_enabled():
            self._copy_beside()

    def _note_tables(self, numbers: Iterable[int]) -> None:
        note = functools.partial(
            self.nodes.note_tables, touched=self.keep.embedding_rows == "touched"
        )
        for number in self.nodes.collections.keys() & set(numbers):
            self._guarded(number, note, number)

    def _copy_beside(self) -> None:
        beside = Beside(self.snapshots.taken[self._first :])

        def give_back(*_: Any) -> None:
            self.snapshots.retire(beside.give_back())

        self._undo.add(give_back)
        put_hook(self._undo, torch_optimizer._global_optimizer_pre_hooks, give_back)

    def _mark(self, number: int, hook_id: OwnId) -> None:
        module = self.nodes.live.get(number, self.nodes.modules[number])
        # torch hands kwargs to a global pre-hook only where this mark is.
        marks = module._forward_pre_hooks_with_kwargs
        if any(hook not in self._own_hooks for hook in module._forward_pre_hooks):
            self._deferred.add(number)
            enter = OwnHook(functools.partial(self._enter_last, number))
            self._own_hooks.add(put_hook(self._undo, module._forward_pre_hooks, enter, marks))
        self._undo.add(lambda: marks.pop(hook_id, None))
        marks[hook_id] = True

    def _watch_parameters(self, numbers: Iterable[int]) -> None:
        arrived = self.gradients.parameter
        for number in numbers:
            for name, parameter in self.nodes.weights(number):
                if not parameter.requires_grad:
                    continue
                key = id(parameter)
                if key not in self._hooked:
                    self._hooked[key] = parameter  # held, so that no other one gets its id
                    hook_gradient(
                        self._undo, parameter, functools.partial(arrived, key, self._lookups.ref)
                    )
                self._sharded |= is_part(parameter)
                # Another tensor each time that FSDP's wrapper gathers it.
                self.grad_places.setdefault((number, name), {})[key] = None

    def release(self) -> None:
        """The model's call ended: its large tables are the optimizer's again."""
        self._guarded(OUTSIDE, self.snapshots.release_tables)

    def remove(self) -> None:
        """Removes all that was installed, in reverse order. Safe to call twice."""
        self._ended = True
        self.release()
        self._undo.run()
        self._stacks.clear()
        self._hooked.clear()

    # ---- entering a call

    def _enter_any(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        number = self.nodes.index.get(id(module))
        if number in self.nodes.lookups and _C._current_graph_task_id() == -1:
            owner, lookup = self.nodes.lookups[number]
            self._guarded(owner, lookup.look_up, *args)
        if number is None or number not in self.targets:
            return
        if number in self._deferred:
            if has_weight_hooks(module) and _C._current_graph_task_id() == -1:
                self._guarded(number, self.nodes.note, [number])
            return
        self._guarded(number, self.enter, number, args, kwargs)

    def _enter_last(self, number: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._guarded(number, self.enter, number, args, kwargs)

    def called(self, module: nn.Module, method: str, args: Any, kwargs: Any) -> None:
        """A method that was asked for is called, as `forward` is."""
        number = self.nodes.index.get(id(module))
        if number in self.targets:
            self._guarded(number, self.enter, number, args, kwargs, method)

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The method ended."""
        self._exit_any(module, args, kwargs, output)

    def raised(self, module: nn.Module, error: BaseException) -> None:
        """The method raised: the entry on the stack goes with the call around it."""

    def _guarded(self, number: int, action: Callable[..., Any], *args: Any) -> None:
        try:
            with self._lock:
                unseen(action, *args)
        except Exception as error:  # noqa: BLE001 - boundary: user code must not see our failures
            self.failures[number] = f"{type(error).__name__}: {error}"

    def enter(self, number: int, args: Any, kwargs: Any, method: str = "forward") -> None:
        """Notes the state at call entry and the arguments before the call."""
        if _C._current_graph_task_id() != -1:  # activation checkpointing runs the forward again
            self.recomputes[number] = self.recomputes.get(number, 0) + 1
            return
        if _C._get_tracing_state() is not None:
            return
        if _C._functorch.peek_interpreter_stack() is not None:
            self.failures[number] = _TRANSFORMED
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.failures[number] = _GRAPHED
            return
        ambient, rng = self._ambient.read(), self._rng.read()
        thread = threading.get_ident()
        if self.nodes.collections:
            self._note_tables((number,))
        stack = self._stacks.setdefault(thread, [])
        # All below: who calls this module may have changed them, as a momentum encoder does.
        noted = self.nodes.reach(number)
        if number in self._deferred and has_weight_hooks(self.nodes.modules[number]):
            noted = noted[1:]  # its own state was noted before those hooks ran
        entered = self.nodes.note(noted)
        self.counts[number] += 1
        if self.counts[number] > self.keep.max_calls:
            stack.append((number, id(kwargs), None, len(self.calls)))
            return
        leaves: list[tuple[Tensor, TensorRef]] = []
        encoder = self._encoder(leaves)
        call = SeenCall(
            number=number,
            step=self.step,
            thread=thread,
            ambient=ambient,
            rng=rng,
            entered=entered,
            args=encoder.encode(args),
            kwargs=encoder.encode(kwargs),
            leaves=leaves,
            containers=encoder.count > 1 and not encoder.pending and number not in self._spread,
            method=method,
        )
        call.opaque = encoder.opaque
        self._await(number, encoder)
        if self.keep.grads and not encoder.pending:
            self.gradients.watch(call.grad_input, leaves, encoder.special)
        if self.keep.grads and self._sharded:  # a weight is another tensor while it is gathered
            self._watch_parameters(self.nodes.reach(number))
        stack.append((number, id(kwargs), call, len(self.calls)))

    def _encoder(self, leaves: list[tuple[Tensor, TensorRef]]) -> Encoder:
        def keep(tensor: Tensor) -> TensorRef:
            ref = self.snapshots.ref(tensor)
            leaves.append((tensor, ref))
            return ref

        return Encoder(keep, module=self.nodes.refer)

    # ---- leaving a call

    def _exit_any(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        number = self.nodes.index.get(id(module))
        if number is None or number not in self.targets or _C._current_graph_task_id() != -1:
            return
        self._guarded(number, self.exit, number, args, kwargs, output)

    def exit(self, number: int, args: Any, kwargs: Any, output: Any) -> None:
        """Notes the output, what the call changed, and asks for gradients."""
        stack = self._stacks.get(threading.get_ident(), [])
        key = number, id(kwargs)
        if all(entry[:2] != key for entry in stack):
            return
        while (entry := stack.pop())[:2] != key:
            pass  # entries above belong to calls that ended by an exception
        call = entry[2]
        for inner in self.calls[entry[3] :]:
            inner.nested |= inner.number == number and inner.thread == threading.get_ident()
        left = self.nodes.note(self.nodes.reach(number))
        if call is None:
            return
        call.left = left
        self._note_mutation(call, args, kwargs)
        leaves: list[tuple[Tensor, TensorRef]] = []
        encoder = self._encoder(leaves)
        if number in self.nodes.lookups:
            output = self.nodes.lookups[number][1].output(args[0], output)
        call.output = encoder.encode(output)
        call.opaque_output = encoder.opaque
        watch = functools.partial(self.gradients.watch, call.grad_output, leaves, encoder.special)
        if self.keep.grads and not encoder.pending:
            watch()
        # Of a value inside others the gradients would be counted in the wrong place.
        alone = any(call.output is place for _, place in encoder.pending)
        self._await(number, encoder, watch if self.keep.grads and alone else None)
        call.leaves = []
        self.calls.append(call)

    def _await(self, number: int, encoder: Encoder, then: Callable[[], None] | None = None) -> None:
        """Values that are not there yet are recorded when the model itself waits for them."""

        def arrived(place: dict[str, Any], value: Any) -> Any:
            if "$opaque" in place and not self._ended:  # it may be waited for again
                self._guarded(number, encoder.arrive, place, value)
                if then is not None:
                    self._guarded(number, then)
            return value

        for awaitable, place in encoder.pending:
            awaitable.callbacks.append(functools.partial(arrived, place))

    def _note_mutation(self, call: SeenCall, args: Any, kwargs: Any) -> None:
        unchanged = [not self.snapshots.changed(t, ref) for t, ref in call.leaves]
        if not call.containers and all(unchanged):
            return
        same = {
            id(t): ref for (t, ref), is_same in zip(call.leaves, unchanged, strict=True) if is_same
        }
        encoder = Encoder(
            lambda t: same.get(id(t)) or self.snapshots.ref(t), module=self.nodes.refer
        )
        after = encoder.encode(args), encoder.encode(kwargs)
        if after != (call.args, call.kwargs):
            call.args_after, call.kwargs_after = after


def _unshared(
    snapshots: Snapshots, original: Any, log_probs: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    # The backward of `ctc_loss` writes inside a parallel region, where no shared page is copied.
    snapshots.never_share(log_probs)
    loss: Tensor = original(log_probs, *args, **kwargs)
    snapshots.never_share(loss)
    return loss


def _unhush() -> None:
    filters: Any = warnings.filters
    for found in [f for f in filters if getattr(f[1], "pattern", None) == _FIRES_TWICE]:
        filters.remove(found)
