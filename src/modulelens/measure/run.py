"""One repeatable run of a callable on fixed inputs. Knows no store, no clock, no verdict."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modulelens.context import RngState, RngWatch, preserved_rng, read_ambient, set_rng, under
from modulelens.errors import UsageError, text_of
from modulelens.measure.state import ModuleState
from modulelens.records import Ambient
from modulelens.tree import as_non_leaf, flatten, is_plain


@dataclass(eq=False)
class Run:
    """A module or callable with inputs, ambient state and random streams, run again and again.

    Use it as a scope: inside `with run:` the ambient state holds, the random streams are set at
    the start and by `fresh`, and at the end switches and streams of the process are what they
    were. `forward` and `backward` open the scope themselves where it is not open yet. What
    changed on the module after `Run` was made, a hook included, is gone after `fresh`. `state` is
    what it was then.

    Args:
        module: An `nn.Module`, one of its methods, or any callable.
        args: Positional arguments; never handed to the module, only copies of them are.
        kwargs: Keyword arguments; the same.
        context: Switches during the run; left out: as they were when `Run` was made.
        rng: Random streams at the start of each run; the same.
        grad_output: One total gradient per tensor leaf of the output that requires grad, None for
            a leaf that got none. None altogether: ones, and dependent outputs add up.
        owner: The module whose state a run may change; left out: the module, or the method's.
    """

    module: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    context: Ambient = field(default_factory=read_ambient)
    rng: RngState = field(default_factory=lambda: RngWatch().read())
    grad_output: Sequence[Tensor | None] | None = None
    owner: nn.Module | None = None

    def __post_init__(self) -> None:
        if self.owner is None:
            owner = getattr(self.module, "__self__", self.module)
            self.owner = owner if isinstance(owner, nn.Module) else None
        self.state = ModuleState(self.owner)
        self._scope = contextlib.ExitStack()
        self._depth = 0
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._leaves: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where it runs: the first accelerator among state and inputs, else the CPU."""
        tensors = [*self.state.tensors, *flatten((self.args, self.kwargs)).tensors]
        kinds = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
        return next(kinds, torch.device("cpu"))

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The copies that `forward` gets, or got: changed in place where the module does that."""
        if self._inputs is None:
            self.fresh()
        assert self._inputs is not None
        return self._inputs

    def __enter__(self) -> Run:
        if not self._depth:
            with contextlib.ExitStack() as stack:
                stack.enter_context(preserved_rng())
                stack.enter_context(under(self.context, device=str(self.device)))
                set_rng(self.rng)
                self._scope = stack.pop_all()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._scope.close()

    def fresh(self) -> None:
        """Puts the module back to what it was, and makes new inputs; in scope, sets the streams.

        Raises:
            UsageError: An argument cannot be copied.
        """
        torch.clear_autocast_cache()  # as at the start of a step: casts of the last run's weights
        self.state.restore()
        self._inputs, self._leaves = self._copy_inputs()
        if self._depth:
            set_rng(self.rng)

    def forward(self) -> Any:
        """Calls the module on the current inputs; makes them if there are none."""
        args, kwargs = self.inputs
        with self:
            return self.module(*args, **kwargs)

    def backward(self, output: Any, *, total: bool = True) -> None:
        """Sends the output gradients back. Without an output that requires grad, does nothing.

        Autocast is off, as it is in a training step's backward. Where `grad_output` is not meant
        as `total`, the output's own gradient hooks get it first, and dependent outputs add up.

        Raises:
            UsageError: `grad_output` does not fit the output's leaves.
        """
        leaves = [tensor for tensor in flatten(output).tensors if tensor.requires_grad]
        totals = self.grad_output
        if totals is not None and len(leaves) != len(totals):
            raise UsageError(
                f"grad_output has {len(totals)} gradients, the output has {len(leaves)} tensors "
                "that require grad",
                hint="give one per tensor that requires grad, in order; None where there is none",
            )
        seeds = [(t, torch.ones_like(t)) for t in leaves]
        with self, contextlib.ExitStack() as stack:
            for entry in self.context.autocast:
                stack.enter_context(torch.autocast(entry.device, enabled=False))
            if totals is not None:
                pairs = zip(leaves, totals, strict=True)
                seeds = [(leaf, seed) for leaf, seed in pairs if seed is not None]
                for leaf, seed in seeds if total else ():
                    stack.callback(_replace_gradient(leaf, seed).remove)
            if seeds:
                torch.autograd.backward([leaf for leaf, _ in seeds], [seed for _, seed in seeds])

    def gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients after `backward`: of parameters by every name, of inputs by leaf path."""
        owner = self.owner
        named = owner.named_parameters(remove_duplicate=False) if owner is not None else ()
        parameters = {name: p.grad for name, p in named if p.grad is not None}
        inputs = {path: leaf.grad for path, leaf in self._leaves.items() if leaf.grad is not None}
        return parameters, inputs

    def _copy_inputs(self) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], dict[str, Tensor]]:
        """New inputs, with the leaf behind each input that requires grad, by path.

        Arguments that are, or share memory with, the module's own tensors stay so.
        """
        live = self.state.tensors
        storages = {s._cdata: s for t in live if is_plain(t) for s in [t.untyped_storage()]}
        own = [*live, *(self.owner.modules() if self.owner is not None else ())]
        memo: dict[Any, Any] = {id(each): each for each in own} | {"torch": storages}
        leaves: dict[str, Tensor] = {}
        with torch.inference_mode(False):
            for root, flat in (("args", flatten(self.args)), ("kwargs", flatten(self.kwargs))):
                for tensor, path in zip(flat.tensors, flat.paths, strict=True):
                    if id(tensor) not in memo and is_plain(tensor):
                        leaf = like(tensor, _copied(tensor, memo))
                        memo[id(tensor)] = leaf if tensor.is_leaf else as_non_leaf(leaf)
                        if tensor.requires_grad:
                            leaves[root + path] = leaf
                for tensor in flat.special:
                    _copy_special(tensor, memo)
            try:
                with _more_is_copied():
                    inputs = copy.deepcopy(self.args, memo), copy.deepcopy(self.kwargs, memo)
            except (TypeError, RuntimeError, NotImplementedError) as error:
                raise UsageError(
                    f"an argument cannot be copied, so it cannot be given twice: {text_of(error)}",
                    hint="pass tensors, numbers and containers of them",
                ) from error
        return inputs, leaves


def _copied(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """The tensor's values, strides and flags; aliases stay aliases through `memo`."""
    storage = copy.deepcopy(tensor.untyped_storage(), memo)
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    made = torch._conj(made) if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def _copy_special(tensor: Tensor, memo: dict[Any, Any]) -> None:
    try:
        copy.deepcopy(tensor, memo)
    except (RuntimeError, NotImplementedError):  # compressed rows, nested without a ragged size
        memo[id(tensor)] = like(tensor, tensor.detach().clone())


@contextlib.contextmanager
def _more_is_copied() -> Iterator[None]:
    """Lets `copy.deepcopy` pass what arguments may hold and Python refuses to copy."""
    table: dict[Any, Any] = copyreg.dispatch_table
    added = _COPIED.keys() - table.keys()
    table.update({kind: _COPIED[kind] for kind in added})
    try:
        yield
    finally:
        for kind in added:
            del table[kind]


_COPIED: dict[type, Callable[[Any], Any]] = {
    types.MappingProxyType: lambda proxy: (types.MappingProxyType, (dict(proxy),)),
    types.ModuleType: lambda module: module.__name__,  # a name: stays as it is
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
}


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as a leaf of the tensor's kind: a parameter or not, with or without a gradient."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


def _replace_gradient(leaf: Tensor, total: Tensor) -> Any:
    """Lets the total stand for what arrives at a leaf.

    A leaf may depend on another one (a loss and its logits): its gradient would reach the other
    one a second time, on top of the total that already holds it.
    """
    # Asked for first: torch crashes at a hook on a view that was written to before its history
    # was written anew.
    _ = leaf.grad_fn
    return leaf.register_hook(lambda _: total)
