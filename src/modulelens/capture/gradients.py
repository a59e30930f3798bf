"""Gradients of one step, taken where they arrive. Knows tensors and references, no modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulelens.capture.hook import Undo, unseen
from modulelens.records import TensorRef
from modulelens.tree import Encoder
from modulelens.tree.shards import inside

Ref = Callable[[Tensor], Any]


class Gradients:
    """Takes gradients while what it installed is not taken back.

    Args:
        ref: Gives tensors their references.
        undo: What takes it back.
        lock: Held while a gradient is taken: backward runs in threads of its own.

    Attributes:
        of_parameters: By `id` of the parameter, in the order in which they arrived.
    """

    def __init__(self, ref: Ref, undo: Undo, lock: Any) -> None:
        self._ref, self._undo, self._lock = ref, undo, lock
        self.of_parameters: dict[int, Any] = {}
        self._watched = self._arrived = False

    @property
    def awaited(self) -> bool:
        """Whether some were watched for and none arrived."""
        return self._watched and not self._arrived

    def watch(
        self, into: dict[str, Any], leaves: list[tuple[Tensor, TensorRef]], special: list[Tensor]
    ) -> None:
        """Puts what arrives at these leaves into a dict, by their number."""
        around = {id(inside(tensor)): tensor for tensor in special}
        unique = list({id(tensor): tensor for tensor, _ in leaves}.values())
        for place, plain in enumerate(unique):
            tensor = around.get(id(plain), plain)
            if tensor.requires_grad and torch.is_grad_enabled():
                self._watched = True
                self._undo.add(self._watch(into, str(place), tensor).remove)

    def _watch(self, into: dict[str, Any], place: str, tensor: Tensor) -> Any:
        node, number = tensor.grad_fn, tensor.output_nr
        if node is None:
            leaf: Any = functools.partial(self._add, into, place, self._ref)
            leaf.__torch_unserializable__ = True  # else saving this tensor would warn
            return tensor.register_hook(leaf)

        def arrived(grads: tuple[Tensor | None, ...]) -> None:
            if (grad := grads[number]) is not None:
                self._add(into, place, self._ref, grad)

        # At the node: what arrives there has passed the hooks that the user put on the tensor.
        return node.register_prehook(arrived)

    def parameter(self, parameter: int, ref: Callable[[int, Tensor], Any], grad: Tensor) -> None:
        """A gradient arrived at the parameter of that `id`."""
        self._add(self.of_parameters, parameter, functools.partial(ref, parameter), grad)

    def _add(self, into: dict[Any, Any], key: Any, ref: Ref, grad: Tensor | None) -> None:
        if grad is None:  # a Function gave none
            return
        # A list: several backward passes of one step add up, which is done when it is stored.
        try:
            with self._lock:
                into.setdefault(key, []).append(unseen(Encoder(ref).encode, grad))
                self._arrived = True
        except Exception as error:  # noqa: BLE001 - boundary: runs inside the user's backward
            into[key] = [{"$opaque": {"type": type(grad).__name__, "why": str(error)}}]
