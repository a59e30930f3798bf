"""Captured tensors -> a module that today's code constructed. What the code says, wins.

An edited constructor may choose other children, other attributes, other shapes: that is the edit,
and laying the captured ones over it would hide it. So only tensors that have a place, modes, and
attributes that a constructor does not set come from the capture; the rest is said in `notes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from modulelens.records import ModuleNode, Structure
from modulelens.tree import Decoder, flatten

_MISSING = object()


class Today:
    """Lays captured state over modules that today's code made.

    Args:
        nodes: The captured modules by number.
        decoder: Makes a decoder.
        hook: Restores a module's hooks.
    """

    def __init__(
        self,
        nodes: dict[int, ModuleNode],
        decoder: Callable[[], Decoder],
        hook: Callable[[nn.Module, ModuleNode], None],
    ) -> None:
        self._nodes = nodes
        self._decoder = decoder
        self._hook = hook
        self.notes: list[str] = []

    def lay_over(self, module: nn.Module, node: ModuleNode, path: str = "") -> nn.Module:
        """The same module; `path` names it in the notes."""
        decoder = self._decoder()
        for live, captured in (
            (module._parameters, node.parameters),
            (module._buffers, node.buffers),
        ):
            self._tensors(live, decoder.tensors(captured), path)
        for name, made in decoder.named(node.attributes).items():
            self._attribute(vars(module), f"{path}{name}", name, (node.attributes[name], made))
        vars(module)["training"] = node.training
        self._hook(module, node)
        for name, child in node.children.items():
            found = module._modules.get(name)
            if found is not None and child is not None:
                self.lay_over(found, self._nodes[child[1]], f"{path}{name}.")
            elif child is not None:
                self.notes.append(f"the captured module {path}{name} has no place in today's code")
        for name in module._modules.keys() - node.children.keys():
            if next(module._modules[name].parameters(), None) is not None:  # type: ignore[union-attr]
                self.notes.append(f"{path}{name} is new: it has its initial values")
        return module

    def _tensors(self, live: dict[str, Any], made: dict[str, Any], path: str) -> None:
        for name, value in made.items():
            old = live.get(name)
            if isinstance(value, Tensor) and isinstance(old, Tensor) and old.shape == value.shape:
                live[name] = value
            elif value is not None:
                self.notes.append(f"the captured {path}{name} has no place in today's code")
        for name in live.keys() - made.keys():
            if live[name] is not None:
                self.notes.append(f"{path}{name} is new: it has its initial values")

    def _attribute(
        self, inside: dict[str, Any], path: str, name: str, captured: tuple[Structure, Any]
    ) -> None:
        structure, made = captured
        now = inside.get(name, _MISSING)
        if now is _MISSING or _holds_tensors(structure):
            inside[name] = made
        elif flatten(now).structure != flatten(made).structure:
            self.notes.append(f"{path} is what today's code sets: {now!r:.60}, not {made!r:.60}")


def _holds_tensors(structure: Structure) -> bool:
    if isinstance(structure, dict):
        tensor = "$tensor" in structure or "$parameter" in structure
        return tensor or any(map(_holds_tensors, structure.values()))
    return isinstance(structure, list) and any(map(_holds_tensors, structure))
