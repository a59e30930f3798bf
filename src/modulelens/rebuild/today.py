"""Captured tensors -> a module that today's code constructed. What the code says, wins.

An edited constructor may choose other children, other attributes, other shapes: that is the edit,
and laying the captured ones over it would hide it. So only tensors that have a place, modes, and
attributes that a constructor does not set come from the capture; of the rest, notes are returned.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from modulelens.records import ModuleNode, Structure, tensor_refs
from modulelens.tree import Decoder, flatten

_MISSING = object()


def lay_state(module: nn.Module, node: ModuleNode, decoder: Decoder, path: str) -> list[str]:
    """Gives one module what has a place in it, and says what has none; `path` names the module."""
    notes = []
    for live, captured in ((module._parameters, node.parameters), (module._buffers, node.buffers)):
        notes += _lay_tensors(live, decoder.tensors(captured), path)
    for name, made in decoder.named(node.attributes).items():
        now = vars(module).get(name, _MISSING)
        if now is _MISSING or _holds_tensors(node.attributes[name]):
            vars(module)[name] = made
        elif flatten(now).structure != flatten(made).structure:
            notes.append(f"{path}{name} is what today's code sets: {now!r:.60}, not {made!r:.60}")
    for name in module._modules.keys() - node.children.keys():
        if next(module._modules[name].parameters(), None) is not None:  # type: ignore[union-attr]
            notes.append(_new(f"{path}{name}"))
    return notes


def _lay_tensors(live: dict[str, Any], made: dict[str, Any], path: str) -> list[str]:
    notes = []
    for name, value in made.items():
        old = live.get(name)
        if isinstance(value, Tensor) and isinstance(old, Tensor) and old.shape == value.shape:
            live[name] = value
        elif value is not None:
            notes.append(f"the captured {path}{name} has no place in today's code")
    return notes + [_new(path + n) for n in live.keys() - made.keys() if live[n] is not None]


def _new(name: str) -> str:
    return f"{name} is new: it has its initial values"


def _holds_tensors(structure: Structure) -> bool:
    return bool(tensor_refs(structure) or tensor_refs(structure, "$parameter"))
