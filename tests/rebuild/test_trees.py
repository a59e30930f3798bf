"""Random module trees: whatever hangs where comes back there, by either way of rebuilding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.capture.loop import add_unverified, rows, same
from torch import Tensor, nn

import modulelens as ml

WIDTH = 4
_names = itertools.count()


class Tree(nn.Module):
    """Runs whatever it holds, in containers of every kind; constructed from modules."""

    def __init__(self, parts: list[nn.Module], kind: str, plain: Any = None) -> None:
        super().__init__()
        names = [f"p{i}" for i in range(len(parts))]
        self.kind, self.plain = kind, plain
        if kind == "list":
            self.parts: Any = nn.ModuleList(parts)
        elif kind == "dict":
            self.parts = nn.ModuleDict(dict(zip(names, parts, strict=True)))
        elif kind == "sequential":
            self.parts = nn.Sequential(*parts)
        elif kind == "plain":
            self.parts = {"inside": [*parts], "again": tuple(parts)}
        else:
            self.parts = None
            for name, part in zip(names, parts, strict=True):
                setattr(self, name, part)
            self.register_module("missing", None)
        self.gains = nn.ParameterList([torch.ones(WIDTH) for _ in parts])
        self.offsets = nn.ParameterDict({name: torch.zeros(WIDTH) for name in names})

    def members(self) -> list[nn.Module]:
        if self.kind == "plain":
            return [*self.parts["inside"], *self.parts["again"]]
        if self.kind == "own":
            return [m for n, m in self._modules.items() if n[0] == "p" and m is not None]
        return [*(self.parts.values() if self.kind == "dict" else self.parts)]

    def forward(self, x: Tensor) -> Tensor:
        for member in self.members():
            x = member(x)
        return x * sum(self.gains, torch.zeros(())) + sum(self.offsets.values(), torch.zeros(()))


class Leaf(nn.Linear):
    def __init__(self, *, bias: bool = True, note: Any = None) -> None:
        super().__init__(WIDTH, WIDTH, bias=bias)
        self.note = note
        self.register_buffer("count", torch.zeros(()), persistent=note is None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x).tanh() * (float(self.count) if self.training else 1)


@st.composite
def leaves(draw: st.DrawFn) -> nn.Module:
    leaf = Leaf(bias=draw(st.booleans()), note=draw(st.sampled_from([None, "a", (1, [2.5])])))
    leaf.weight.requires_grad_(draw(st.booleans()))
    return leaf.train(draw(st.booleans()))


def _grow(inner: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    kinds = st.sampled_from(["list", "dict", "sequential", "own", "plain"])
    plain = st.sampled_from([None, {"x": [1]}, "text"])
    # Some are there twice: a shared layer is one module under two names.
    parts = st.lists(inner, min_size=1, max_size=2).flatmap(
        lambda found: st.sampled_from([found, [*found, found[0]]])
    )
    return st.builds(Tree, parts, kinds, plain).map(_maybe_tied)


def _maybe_tied(tree: Tree) -> Tree:
    found = [m for m in tree.members() if isinstance(m, Leaf)]
    if len(found) > 1:
        found[-1].weight = found[0].weight
    return tree


trees = st.recursive(leaves(), _grow, max_leaves=5).filter(lambda m: isinstance(m, Tree))


def picture(module: nn.Module) -> Any:
    """All of a tree that can be told without identities."""
    named = list(module.named_modules(remove_duplicate=False))
    parameters = list(module.named_parameters(remove_duplicate=False))
    first = {id(p): n for n, p in reversed(parameters)} | {id(m): n for n, m in reversed(named)}
    return (
        [(name, type(m), m.training, first[id(m)]) for name, m in named],
        [(name, first[id(p)], p.requires_grad, type(p)) for name, p in parameters],
        [(name, sorted(m._non_persistent_buffers_set)) for name, m in named],
        [(name, getattr(m, "note", 0), getattr(m, "plain", 0)) for name, m in named],
        list(module.state_dict()),
    )


@given(trees, st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_tree_comes_back_by_either_way(tmp_path: Path, tree: Tree, tracked: bool) -> None:
    if tracked:
        with ml.track_init():
            tree = Tree([tree], "own", plain=7)
    tree(rows())
    before, state = picture(tree), {n: t.clone() for n, t in tree.state_dict().items()}
    with ml.trace(tree, name=f"tree{next(_names)}", modules="", keep=ml.Keep(grads=True)) as trace:
        tree(rows()).sum().backward()
    entry = add_unverified(trace, tmp_path)[0]
    for way in ("structure", "init") if tracked else ("structure",):
        made = entry.rebuild(strategy=way)
        assert picture(made) == before
        assert same(dict(made.state_dict()), state)
    assert entry.check(backward=True).status is ml.Status.EXACT
