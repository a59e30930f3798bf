"""A module's state that changes between two calls of one step is seen, wherever it sits."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modulelens as ml
from modulelens.capture.nodes import Nodes, OwnState
from modulelens.capture.snapshot import Snapshots
from modulelens.capture.unchanged import Unchanged


class Config:
    def __init__(self) -> None:
        self.scale = 1.0
        self.layers = [{"width": 3}, {"width": 4}]
        self.parent: Any = None


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Counting(dict):  # type: ignore[type-arg]
    pass


class Holder(nn.Module):
    """Holds one value of every kind that may change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.config = Config()
        self.config.parent = self.config
        self.slotted = Slotted()
        self.counting = Counting(a=1)
        self.array = np.zeros(3)
        self.members = {1, 2}
        self.queue = collections.deque([1], maxlen=3)
        self.namespace = types.SimpleNamespace(depth=1)
        self.pair = ([1], 2)
        self.plain = torch.zeros(2)
        self.flag = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "config": lambda m: setattr(m.config, "scale", 2.0),
    "config deep": lambda m: m.config.layers[1].update(width=5),
    "config new": lambda m: setattr(m.config, "extra", 1),
    "slots": lambda m: setattr(m.slotted, "scale", 2.0),
    "dict subclass": lambda m: m.counting.update(b=2),
    "array": lambda m: m.array.__setitem__(0, 1.0),
    "set": lambda m: m.members.add(3),
    "deque": lambda m: m.queue.append(2),
    "namespace": lambda m: setattr(m.namespace, "depth", 2),
    "list in a tuple": lambda m: m.pair[0].append(2),
    "tensor": lambda m: m.plain.add_(1),
    "buffer": lambda m: m.seen.add_(1),
    "weight": lambda m: m.weight.data.mul_(2),
    "attribute": lambda m: setattr(m, "flag", False),
    "mode": lambda m: m.eval(),
    "child": lambda m: m.add_module("late", nn.ReLU()),
}


class Twice(nn.Module):
    def __init__(self, change: Callable[[Holder], Any]) -> None:
        super().__init__()
        self.holder = Holder()
        self.__dict__["change"] = change

    def forward(self, x: Tensor) -> Tensor:
        first = self.holder(x)
        with torch.no_grad():
            self.__dict__["change"](self.holder)
        return first + self.holder(x)


def nodes(change: Callable[[Holder], Any], folder: Path) -> list[str]:
    model = Twice(change)
    with ml.trace(model, modules="holder") as trace:
        model(torch.ones(3))
    (entry,) = ml.Repo(folder).add(trace, verify=False)
    return [call.node for call in entry.metadata.calls]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen(name: str, tmp_path: Path) -> None:
    before, after = nodes(CHANGES[name], tmp_path / "repo")
    assert before != after


def test_no_change_gives_one_state(tmp_path: Path) -> None:
    before, after = nodes(lambda _: None, tmp_path / "repo")
    assert before == after


def test_an_unchanged_module_is_told_without_reading_it_again() -> None:
    with ml.track_init():
        holder = nn.Linear(3, 3)
    holder.names, holder.config = {"a", "b"}, Config()
    watch = Unchanged(holder, lambda _: False)
    assert watch.still()
    holder.names.add("c")
    assert not watch.still()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.lin = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.lin(x) * self.seen


class Unregistered(nn.Module):
    """Calls modules that no parent knows: in containers, an object, a closure, each other's."""

    def __init__(self) -> None:
        super().__init__()
        inner = Counts()
        inner.__dict__["other"] = [Counts()]
        self.listed = [Counts()]
        self.keyed = {"a": (Counts(),)}
        self.config = Config()
        self.config.parent = types.SimpleNamespace(deep=inner)
        self.__dict__["owner"] = [self]

    def forward(self, x: Tensor) -> Tensor:
        deep = self.config.parent.deep
        for part in (self.listed[0], self.keyed["a"][0], deep, deep.other[0]):
            x = part(x)
        return x


class CallsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Unregistered()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x))


@pytest.mark.parametrize("modules", ["*", "part"])
def test_modules_in_plain_attributes_have_the_state_of_each_call(tmp_path, modules):
    model, repo = CallsTwice(), ml.Repo(tmp_path / "repo")
    with ml.trace(model, name="m", modules=modules, steps=2) as trace:
        for _ in range(2):
            model(torch.randn(3, 2)).sum().backward()
    repo.add(trace)
    entry = repo["m/part"]
    assert entry.grade.level.value == "exact", entry.grade
    for call in range(4):
        assert entry.rebuild(call=call).listed[0].seen == call
        assert entry.check(call=call).status == "EXACT"
    assert "Counts" in " ".join(entry.metadata.calls[0].notes)


def _own(value: object, *, parts: bool) -> OwnState:
    weight: dict[str, Any] = {"$parameter": value}
    if parts:
        where = {"placements": [{"kind": "Shard", "dim": 0}], "ranks": [0, 1]}
        weight = {"$dtensor": {"local": {"$tensor": value}, **where}}
    return dataclasses.replace(_EMPTY, parameters={"weight": weight})


_EMPTY = OwnState("m:A", True, {}, {}, (), {}, (), (), (), (), (), {}, "")


@pytest.mark.parametrize(
    ("seen", "filled"),
    [
        ("aA", "AA"),
        ("aAa", "AAA"),
        ("aAabBb", "AAABBB"),
        ("abBb", "aBBB"),  # not called in the first step: nothing gathered its weight there
        ("aAab", "AAAb"),
        ("AB", "AB"),
        ("ab", "ab"),
    ],
)
def test_shards_have_the_weight_that_was_gathered_of_them(seen: str, filled: str) -> None:
    """Small letters are shards of what the large one is whole; an optimizer makes the next one."""
    nodes = Nodes(nn.Linear(1, 1), Snapshots(), set())
    states = {letter: _own(letter.lower(), parts=letter.islower()) for letter in "abAB"}
    nodes.versions = [[(moment, states[letter]) for moment, letter in enumerate(seen)]]
    nodes.fill_shards()
    assert [state for _, state in nodes.versions[0]] == [states[letter] for letter in filled]
