"""One call of a captured module: what went in, what came out, under which context."""

from __future__ import annotations

import msgspec

from modulelens.records.environment import Context
from modulelens.records.tensor import Structure


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a module, as seen inside all foreign hooks.

    `method` was called: `forward`, through the module itself, or one that was asked for. `nested`
    is a call inside another call of the same module: the gradients of parameters that it gave are
    part of that one's.

    `node` is the digest of the module's node at call entry. `args` and `kwargs` are the values
    before the call; `args_after` and `kwargs_after` are set only when the call changed them, and
    `mutated` names the paths. `buffers_after` holds, by dotted name, the buffers and plain tensor
    attributes that the call changed, with their values after it, `attributes_after` the numbers,
    texts and containers of them. `grad_output` and `grad_input` are by leaf number, in the order
    of `tree.flatten` over the output and over `(args, kwargs)`; the gradients of inputs are totals
    over all consumers in the step. `notes` say what was not kept or is not compared.
    """

    index: int
    node: str
    method: str = "forward"
    nested: bool = False
    context: Context
    args: Structure = None
    kwargs: Structure = None
    output: Structure = None
    args_after: Structure = None
    kwargs_after: Structure = None
    mutated: tuple[str, ...] = ()
    buffers_after: dict[str, Structure] = {}
    attributes_after: dict[str, Structure] = {}
    grad_output: dict[str, Structure] = {}
    grad_input: dict[str, Structure] = {}
    step: int = 0
    thread: int = 0
    notes: tuple[str, ...] = ()
