"""Random models: trees of modules that call their children by a random script. Knows no tracer.

A plan is plain data, so a model is made of it anew as often as needed, with the same weights.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from tests.capture import zoo
from torch import Tensor, nn


class Explodes(nn.Module):
    """Raises after its child was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        raise ValueError("inside")


class Recurses(nn.Module):
    """Calls itself until the depth is used up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.layer(x) if depth == 0 else self(x, depth=depth - 1).tanh() + x


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "dropout": lambda: nn.Dropout(0.5),
    "norm": lambda: nn.BatchNorm1d(4),
    "inplace": zoo.InplaceOnInput,
    "counter": zoo.PythonCounter,
    "buffer": zoo.NonPersistentBuffer,
    "twice": zoo.CalledTwice,
    "recursive": Recurses,
    "generator": zoo.HandsGenerator,
    "explodes": Explodes,
}


def in_eval(child: nn.Module, x: Tensor) -> Tensor:
    modes = [(module, module.training) for module in child.modules()]
    child.eval()
    try:
        return child(x)
    finally:
        for module, mode in modes:
            module.training = mode


def without_gradient(child: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x + child(x)


def in_a_thread(child: nn.Module, x: Tensor) -> Tensor:
    box: list[Any] = []

    def work() -> None:
        try:
            box.append(child(x))
        except ValueError as error:
            box.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(box[0], ValueError):
        raise box[0]
    return box[0]


VERBS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "call": lambda child, x: child(x),
    "add": lambda child, x: x + child(x),
    "repeat": lambda child, x: child(child(x).tanh()),
    "eval": in_eval,
    "no_grad": without_gradient,
    "thread": in_a_thread,
}
HOLDERS = ("attributes", "list", "dict", "plain list", "plain dict")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One inner module: how it holds its children, what they are, what it does with them.

    A child is a leaf's name, a plan, or `("again" | "copy" | "tied", number)` of an earlier module.
    """

    holder: str
    children: tuple[Any, ...]
    script: tuple[tuple[str, int], ...]
    catches: bool = True


class Inner(nn.Module):
    """Calls its children as its script says; goes on after one that raised, or not."""

    def __init__(
        self,
        holder: str,
        parts: list[nn.Module],
        script: tuple[tuple[str, int], ...],
        catches: bool,
    ) -> None:
        super().__init__()
        self.script, self.catches, self.count = script, catches, len(parts)
        names = [f"part{i}" for i in range(len(parts))]
        if holder == "attributes":
            for name, part in zip(names, parts, strict=True):
                setattr(self, name, part)
        else:
            pairs = dict(zip(names, parts, strict=True))
            self.parts = {
                "list": lambda: nn.ModuleList(parts),
                "dict": lambda: nn.ModuleDict(pairs),
                "plain list": lambda: list(parts),
                "plain dict": lambda: pairs,
            }[holder]()

    def part(self, index: int) -> nn.Module:
        """The child of that number."""
        parts: Any = vars(self).get("parts", self._modules.get("parts"))
        if parts is None:
            return getattr(self, f"part{index}")
        return list(parts.values() if hasattr(parts, "values") else parts)[index]

    def forward(self, x: Tensor) -> Tensor:
        for verb, index in self.script:
            try:
                x = VERBS[verb](self.part(index % self.count), x)
            except ValueError:
                if not self.catches:
                    raise
        return x


def make(plan: Plan) -> nn.Module:
    """The model of a plan."""
    return _make(plan, [])


def _make(plan: Any, made: list[nn.Module]) -> nn.Module:
    if isinstance(plan, Plan):
        parts = [_make(child, made) for child in plan.children]
        found: nn.Module = Inner(plan.holder, parts, plan.script, plan.catches)
    elif isinstance(plan, str):
        found = LEAVES[plan]()
    else:
        found = _earlier(*plan, made)
    made.append(found)
    return found


def _earlier(how: str, number: int, made: list[nn.Module]) -> nn.Module:
    if not made:
        return nn.Linear(4, 4)
    found = made[number % len(made)]
    if how == "again":
        return found
    if how == "copy":
        return copy.deepcopy(found)
    tied = nn.Linear(4, 4)
    weights = [m.weight for m in found.modules() if isinstance(m, nn.Linear)]
    tied.weight = weights[0] if weights else tied.weight
    return tied


_SCRIPTS = st.lists(st.tuples(st.sampled_from(sorted(VERBS)), st.integers(0, 3)), max_size=4).map(
    tuple
)
_EARLIER = st.tuples(st.sampled_from(["again", "copy", "tied"]), st.integers(0, 5))


def plans(catches: st.SearchStrategy[bool]) -> st.SearchStrategy[Plan]:
    """Plans of trees, three deep at most."""

    def above(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Plan]:
        children = st.lists(below | _EARLIER, min_size=1, max_size=3).map(tuple)
        return st.builds(Plan, st.sampled_from(HOLDERS), children, _SCRIPTS, catches)

    leaves = st.sampled_from(sorted(LEAVES))
    return above(leaves | above(leaves | above(leaves)))
