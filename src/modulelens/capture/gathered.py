"""Weights that lie in shards, but while a framework gathers them for its own calls.

Knows `DTensor` parts and the flat parameters of FSDP's wrapper, no hooks. Who calls a module that
gathers sees its shards: such a moment gets what they are gathered to next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modulelens.capture.snapshot import Snapshot
from modulelens.capture.wrappers import bare
from modulelens.tree.shards import parts_in

if TYPE_CHECKING:
    from modulelens.capture.nodes import OwnState

#: The name that FSDP's wrapper gives the parameter in which it keeps those of modules.
FLAT = "_flat_param"
IN_SHARDS = (
    "sharded: its weights lie in shards of a flat parameter, which FSDP gathered for no call within"
    " this step: call it within its wrapper's forward, or use fully_shard"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """The flat parameter that holds a module's weights, and the number of elements of each.

    During its own calls FSDP puts views of it in their place, gathered; else it is a shard.
    """

    handle: Any
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def shard(self) -> Tensor | None:
        """This rank's part, at a moment at which the weights are not gathered."""
        flat: Tensor = self.handle.flat_param
        return flat if self.handle.is_sharded(flat) else None

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """The gathered weights."""
        for name in self.sizes:
            yield name, vars(module).get(name, module._parameters.get(name))


def flat_parameters(model: nn.Module) -> dict[int, Flat]:
    """By `id`, the modules whose weights lie in flat parameters."""
    found: dict[int, Flat] = {}
    for wrapper in model.modules():
        handle = vars(wrapper).get("_handle")
        if handle is None or bare(wrapper) is wrapper:
            continue
        flat = handle.flat_param
        sizes = [*(shape.numel() for shape in flat._shapes), *(0 for _ in flat._shared_param_infos)]
        infos = (*flat._param_infos, *flat._shared_param_infos)
        for (name, owner, *_), size in zip(infos, sizes, strict=True):
            found.setdefault(id(owner), Flat(handle)).sizes[name] = size
    return found


def fill(versions: list[tuple[int, OwnState]], equal: Equal) -> None:
    """Gives moments at which a module's weights lay in shards what these were gathered to next."""
    known: list[tuple[dict[str, Any], OwnState]] = []
    for place, (moment, state) in enumerate(versions):
        own = state.parameters
        if not _cuts(state):
            continue
        found = next((there for parts, there in known if equal(parts, own)), None)
        if found is None:
            after = (s for _, s in versions[place + 1 :])
            found = next((s for s in after if not equal(s.parameters, own)), state)
            if _cuts(found) >= _cuts(state):  # other shards: an optimizer came between
                found = state
        known.append((own, found))
        filled = {name: value for name, value in found.parameters.items() if name != FLAT}
        state = dataclasses.replace(state, parameters=filled, refused=found.refused)
        versions[place] = moment, state


def _cuts(state: OwnState) -> int:
    """Along how many dimensions of meshes its parameters lie in parts, in all."""
    parts = parts_in(state.parameters)
    return sum(len(body.get("placements", ())) for body in parts) + (state.refused == IN_SHARDS)


class Equal:
    """Tells whether the parameters of two moments are the same, flat ones by their bytes.

    Gathering takes the memory of a shard for itself: a snapshot is taken anew of what is the same.
    """

    def __init__(self, taken: Sequence[Snapshot]) -> None:
        self._taken = taken
        self._known: dict[tuple[str, str], bool] = {}

    def __call__(self, one: dict[str, Any], two: dict[str, Any]) -> bool:
        """Whether they are."""
        if one == two or FLAT not in one or FLAT not in two:
            return one == two
        keys = one[FLAT]["$tensor"].key, two[FLAT]["$tensor"].key
        if keys not in self._known:
            kept = [self._taken[int(key[1:])] for key in keys]
            for snapshot in kept:
                snapshot.settle()
            data = (torch.empty(0, dtype=torch.uint8).set_(snapshot.data) for snapshot in kept)
            self._known[keys] = torch.equal(*data)
        return self._known[keys]
