"""One repeatable run of a callable on fixed inputs. Knows no store, no clock, no verdict."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modulelens.context import RngState, RngWatch, preserved_rng, set_rng, under
from modulelens.errors import UsageError
from modulelens.measure.state import ModuleState
from modulelens.records import Ambient
from modulelens.tree import as_non_leaf, flatten, is_plain


@dataclass(eq=False)
class Run:
    """A module or callable with inputs, ambient state and random streams, run again and again.

    Use it as a scope: inside `with run:` the ambient state holds, `fresh` sets the random streams,
    and at the end switches and streams of the process are what they were. Outside, `forward` and
    `backward` open the scope for their own length. What changed on the module after `Run` was
    made, a hook included, is gone after `fresh`.

    Args:
        module: An `nn.Module`, one of its methods, or any callable.
        args: Positional arguments; never handed to the module, only copies of them are.
        kwargs: Keyword arguments; the same.
        context: Switches during the run; None leaves them as they are.
        rng: Random streams at the start of each run; None: as they were when `Run` was made.
        grad_output: One total gradient per tensor leaf of the output that requires grad, None for
            a leaf that got none. None altogether: ones, and dependent outputs add up.
    """

    module: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    context: Ambient | None = None
    rng: RngState | None = None
    grad_output: Sequence[Tensor | None] | None = None

    def __post_init__(self) -> None:
        self.rng = self.rng or RngWatch().read()
        self._state = ModuleState(self.owner)
        self._scope: contextlib.ExitStack | None = None
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._leaves: dict[str, Tensor] = {}

    @property
    def owner(self) -> nn.Module | None:
        """The module whose state a run may change; None for a plain callable."""
        owner = getattr(self.module, "__self__", self.module)
        return owner if isinstance(owner, nn.Module) else None

    @property
    def tensors(self) -> list[Tensor]:
        """The module's own tensors: parameters, buffers and plain attributes."""
        return self._state.tensors

    @property
    def device(self) -> torch.device:
        """Where it runs: the first accelerator among state and inputs, else the CPU."""
        tensors = [*self._state.tensors, *flatten((self.args, self.kwargs)).tensors]
        kinds = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
        return next(kinds, torch.device("cpu"))

    @property
    def entered(self) -> bool:
        """Whether the scope is open."""
        return self._scope is not None

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The copies that `forward` gets, or got: changed in place where the module does that."""
        if self._inputs is None:
            self.fresh()
        assert self._inputs is not None
        return self._inputs

    def __enter__(self) -> Run:
        if self._scope is not None:
            raise UsageError("this Run is already entered", hint="use one `with run:` at a time")
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserved_rng())
            if self.context is not None:
                stack.enter_context(under(self.context, device=str(self.device)))
            self._scope = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        scope, self._scope = self._scope, None
        assert scope is not None
        scope.close()

    def fresh(self) -> None:
        """Puts the module back to what it was, and makes new inputs; in scope, sets the streams.

        Raises:
            UsageError: An argument cannot be copied.
        """
        torch.clear_autocast_cache()  # as at the start of a step: casts of the last run's weights
        self._state.restore()
        self._inputs, self._leaves = self._copy_inputs()
        if self._scope is not None and self.rng is not None:
            set_rng(self.rng)

    def forward(self) -> Any:
        """Calls the module on the current inputs; makes them if there are none."""
        args, kwargs = self.inputs
        if self._scope is not None:
            return self.module(*args, **kwargs)
        with self:
            if self.rng is not None:
                set_rng(self.rng)
            return self.module(*args, **kwargs)

    def backward(self, output: Any) -> None:
        """Sends the output gradients back. Without an output that requires grad, does nothing.

        Autocast is off, as it is in a training step's backward.

        Raises:
            UsageError: `grad_output` does not fit the output's leaves.
        """
        if self._scope is None:
            with self:
                return self.backward(output)
        leaves = [tensor for tensor in flatten(output).tensors if tensor.requires_grad]
        with contextlib.ExitStack() as stack:
            for entry in self.context.autocast if self.context else ():
                stack.enter_context(torch.autocast(entry.device, enabled=False))
            if self.grad_output is None:
                seeds = [torch.ones_like(leaf) for leaf in leaves]
                torch.autograd.backward(leaves, seeds) if leaves else None
            else:
                _backward_totals(leaves, self.grad_output)
        return None

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
        own = self._state.tensors
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in own if is_plain(t)}
        memo: dict[Any, Any] = {id(tensor): tensor for tensor in own} | {"torch": storages}
        if self.owner is not None:
            memo |= {id(child): child for child in self.owner.modules()}
        leaves: dict[str, Tensor] = {}
        with torch.inference_mode(False):
            for root, value in (("args", self.args), ("kwargs", self.kwargs)):
                flat = flatten(value)
                for tensor, path in zip(flat.tensors, flat.paths, strict=True):
                    if id(tensor) not in memo and is_plain(tensor):
                        leaf = _copy_tensor(tensor, memo)
                        memo[id(tensor)] = leaf if tensor.is_leaf else as_non_leaf(leaf)
                        if tensor.requires_grad:
                            leaves[root + path] = leaf
            try:
                inputs = copy.deepcopy(self.args, memo), copy.deepcopy(self.kwargs, memo)
            except (TypeError, RuntimeError, NotImplementedError) as error:
                raise UsageError(
                    f"an argument cannot be copied, so it cannot be given twice: {error}",
                    hint="pass tensors, numbers and containers of them",
                ) from error
        return inputs, leaves


def _copy_tensor(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """A leaf with the tensor's values, strides and flags; aliases stay aliases through `memo`."""
    storage = copy.deepcopy(tensor.untyped_storage(), memo)
    with torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        made = torch._conj(made) if tensor.is_conj() else made
        made = torch._neg_view(made) if tensor.is_neg() else made
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _backward_totals(leaves: list[Tensor], totals: Sequence[Tensor | None]) -> None:
    """Seeds each leaf, and lets a hook replace what arrives there by the total.

    A leaf may depend on another one (a loss and its logits): its gradient would reach the other
    one a second time, on top of the total that already holds it.
    """
    if len(leaves) != len(totals):
        raise UsageError(
            f"grad_output has {len(totals)} gradients, the output has {len(leaves)} tensors that "
            "require grad",
            hint="give one per tensor that requires grad, in order; None where there is none",
        )
    pairs = [(leaf, total) for leaf, total in zip(leaves, totals, strict=True) if total is not None]
    handles = [_replace_gradient(leaf, total) for leaf, total in pairs]
    try:
        if pairs:
            torch.autograd.backward([leaf for leaf, _ in pairs], [total for _, total in pairs])
    finally:
        for handle in handles:
            handle.remove()


def _replace_gradient(leaf: Tensor, total: Tensor) -> Any:
    # Asked for first: torch crashes at a hook on a view that was written to before its history
    # was written anew.
    _ = leaf.grad_fn
    return leaf.register_hook(lambda _: total)
