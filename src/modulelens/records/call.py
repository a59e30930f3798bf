"""One call of a captured module: what went in, what came out, under which context."""

from __future__ import annotations

import msgspec

from modulelens.records.environment import Context
from modulelens.records.tensor import Structure


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a module's forward, as seen inside all foreign hooks.

    `node` is the digest of the module's node at call entry. `args` and `kwargs` are the values
    before the call; `args_after` and `kwargs_after` are set only when the call changed them, and
    `mutated` names the paths. `buffers_after` holds, by dotted name, the buffers and plain tensor
    attributes that the call changed, with their values after it. `grad_output` and `grad_input`
    are by leaf number, in the order of `tree.flatten` over the output and over `(args, kwargs)`;
    the gradients of inputs are totals over all consumers in the step.
    """

    index: int
    node: str
    context: Context
    args: Structure = None
    kwargs: Structure = None
    output: Structure = None
    args_after: Structure = None
    kwargs_after: Structure = None
    mutated: tuple[str, ...] = ()
    buffers_after: dict[str, Structure] = {}
    grad_output: dict[str, Structure] = {}
    grad_input: dict[str, Structure] = {}
    step: int = 0
    thread: int = 0
    notes: tuple[str, ...] = ()
