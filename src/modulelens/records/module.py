"""One module's own state at one moment. Children are referred to, not contained."""

from __future__ import annotations

from typing import Literal

import msgspec

from modulelens.records.source import InitCall
from modulelens.records.tensor import Structure


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """A foreign hook that can be restored. `kwargs`: it is called with keyword arguments."""

    kind: Literal["_forward_pre_hooks", "_forward_hooks"]
    kwargs: bool
    hook: Structure


class ModuleNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One `nn.Module` without its children.

    `parameters`, `buffers` and `attributes` map a name to a structure (None for a slot that is
    registered but empty). `children` maps a name to the digest of the child's node and the number
    of the child within its trace: two names with one number are one module. `hooks`
    holds foreign hooks that can be restored; `foreign_hooks` names those that cannot.
    `opaque` maps an attribute to the reason why its value is not restored.
    """

    cls: str
    number: int = 0
    fqn: str = ""
    training: bool = True
    parameters: dict[str, Structure] = {}
    buffers: dict[str, Structure] = {}
    non_persistent: tuple[str, ...] = ()
    attributes: dict[str, Structure] = {}
    children: dict[str, tuple[str, int] | None] = {}
    parametrized: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] | None = None
    foreign_hooks: tuple[str, ...] = ()
    opaque: dict[str, str] = {}
    init: InitCall | None = None
    refused: str = ""
