"""A value as structure + tensor leaves with readable paths, for comparing and walking."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from modulelens.records import Structure
from modulelens.tree.encode import Encoder

#: Kinds and fields that show in no path: what they hold is reached through their owner.
_TRANSPARENT = {"$tuple", "$set", "$frozenset", "$object", "$structseq", "items", "inner", "parts"}


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened value.

    `structure` holds `{"$tensor": i}` for the i-th of `tensors`; `paths[i]` reads like code
    (`["logits"]`, `[0].x`). Tensors are the live ones: nothing is copied or detached. Tensors in
    `special` (sparse, nested, quantised, subclasses) give the plain tensors they are made of.
    """

    structure: Structure
    tensors: list[Tensor]
    paths: list[str]
    opaque: list[str]
    special: list[Tensor]

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors by their paths."""
        return dict(zip(self.paths, self.tensors, strict=True))


def flatten(value: Any) -> Flat:
    """Flattens nested containers, dataclasses, configs, caches and special tensors.

    The same tensor met twice is one leaf. Never raises: what has no rule becomes `$opaque` in the
    structure and is named in `opaque`.
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def keep(tensor: Tensor) -> int:
        number = numbers.get(id(tensor))
        if number is None:
            number = numbers[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return number

    encoder = Encoder(keep, module=lambda m: {"cls": type(m).__qualname__})
    encoder.layouts = False
    structure = encoder.encode(value)
    paths = [""] * len(tensors)
    _name(structure, "", paths)
    return Flat(structure, tensors, paths, encoder.opaque, encoder.special)


def _name(node: Any, path: str, paths: list[str]) -> None:
    if isinstance(node, list):
        for i, item in enumerate(node):
            _name(item, f"{path}[{i}]", paths)
    elif isinstance(node, dict):
        for key, item in node.items():
            if key in ("$tensor", "$parameter") and type(item) is int:
                paths[item] = paths[item] or path
                return
            if key in ("$dict", "$odict"):
                for name, inside in item:
                    shown = f'"{name}"' if isinstance(name, str) else repr(name)
                    _name(inside, f"{path}[{shown}]", paths)
            else:
                _name(item, _step(path, key), paths)


def _step(path: str, key: str) -> str:
    if key in _TRANSPARENT:
        return path
    if key in ("vars", "slots"):
        return path + "."
    if key.startswith("$"):
        return f"{path}.{key[1:]}"
    return path + key if path.endswith(".") else f'{path}["{key}"]'


def tensors_of(value: Any) -> list[Tensor]:
    """The tensor leaves of a value, special tensors whole, each object once."""
    if isinstance(value, torch.Tensor):
        return [value]
    return flatten(value).tensors
