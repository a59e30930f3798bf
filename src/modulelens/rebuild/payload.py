"""What rebuilding needs of an entry, behind callables. Knows no store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from modulelens.records import Metadata, ModuleNode, TensorRef, from_json


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
            return [self._expand(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$intern" in value:
            return self._expand(
                from_json(self.blob(value["$intern"]), dict, what="an interned value")
            )
        return {key: self._expand(item) for key, item in value.items()}
