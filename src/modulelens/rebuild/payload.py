"""What rebuilding needs of an entry, behind callables. Knows no store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from modulelens.errors import Corrupted
from modulelens.records import Metadata, ModuleNode, TensorRef, from_json

_MOST_LEVELS = 150


@dataclasses.dataclass(frozen=True)
class Payload:
    """An entry's record and where its bytes come from.

    Args:
        metadata: The entry's record.
        blob: Digest -> the blob's bytes, verified.
        storage: A reference -> new memory that holds its bytes, private to the caller.
    """

    metadata: Metadata
    blob: Callable[[str], bytes]
    storage: Callable[[TensorRef], torch.UntypedStorage]

    def nodes(self, digest: str) -> list[ModuleNode]:
        """The node of that digest and all below it, each once, level by level.

        Raises:
            Corrupted: They are nested too deep, or do not agree about their numbers.
        """
        found: dict[str, ModuleNode] = {}
        level = [digest]
        for _ in range(_MOST_LEVELS):
            found |= {name: self.node(name) for name in level if name not in found}
            below = [child for name in level for child in found[name].children.values() if child]
            level = [name for name, _ in below if name not in found]
            if not level and all(found[name].number == number for name, number in below):
                return list(found.values())
        raise Corrupted(
            f"node {digest[:12]}: modules are nested over {_MOST_LEVELS} deep, or misnumbered"
        )

    def node(self, digest: str) -> ModuleNode:
        """The node of that digest, with interned values put back in place."""
        node = from_json(self.blob(digest), ModuleNode, what=f"node {digest[:12]}")
        init = node.init
        if init is not None:
            args, kwargs = self._expand(init.args), self._expand(init.kwargs)
            init = msgspec.structs.replace(init, args=args, kwargs=kwargs)
        attributes = {name: self._expand(value) for name, value in node.attributes.items()}
        return msgspec.structs.replace(node, attributes=attributes, init=init)

    def _expand(self, value: Any) -> Any:
        if isinstance(value, list):
            return list(map(self._expand, value))
        if not isinstance(value, dict):
            return value
        if "$intern" in value:  # one that is interned holds no other, so this ends
            return from_json(self.blob(value["$intern"]), dict, what="an interned value")
        return dict(zip(value, map(self._expand, value.values()), strict=True))
