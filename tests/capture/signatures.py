"""Modules with every form of call and constructor signature. Knows no tracer."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from tests.capture.loop import rows
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


def total(value: Any) -> Tensor:
    """The sum of all tensors and numbers in a nested value."""
    if isinstance(value, Tensor):
        return value.float().sum()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(total, value), start=torch.zeros(()))
    return torch.tensor(float(value) if isinstance(value, (int, float)) else 0.0)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def add(self, *values: Any) -> Tensor:
        """All that was given, in one tensor."""
        return self.layer(rows()) * total(values)


class Positional(Adds):
    def forward(self, a: Any, b: Any, /) -> Tensor:
        return self.add(a, b)


class Defaults(Adds):
    def forward(self, a: Any, b: Any = 2.0, c: Any = None) -> Tensor:
        return self.add(a, b, c)


class Keywords(Adds):
    def forward(self, *, a: Any, b: Any = (1, 2)) -> Tensor:
        return self.add(a, b)


class Everything(Adds):
    def forward(
        self, a: Any, /, b: Any, c: Any = 3, *rest: Any, d: Any, e: Any = 1, **more: Any
    ) -> Tensor:
        return self.add(a, b, c, rest, d, e, more)


class Anything(Adds):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.add(args, kwargs)


class Hands(nn.Module):
    """Calls its child as it was called itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs) + 1


_SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, "text", ""])
_TENSORS = st.integers(0, 3).map(lambda n: rows(n, 2)) | st.just(torch.arange(3))
VALUES = st.recursive(
    _SCALARS | _TENSORS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["a", "self", "$tensor", ""]), inner, max_size=2)
    ),
    max_leaves=4,
)


def _calls(
    least: int, most: int, needed: str = "", optional: str = "", late: str = ""
) -> st.SearchStrategy[Call]:
    """Calls of `least` to `most` positional arguments and keywords; `late` come after those."""

    def keywords(args: list[Any]) -> st.SearchStrategy[Call]:
        free = [name for place, name in enumerate(late, start=least) if place >= len(args)]
        chosen = st.fixed_dictionaries(
            dict.fromkeys(needed, VALUES),
            optional=dict.fromkeys([*optional, *free], VALUES),
        )
        return chosen.map(lambda kwargs: (tuple(args), kwargs))

    return st.lists(VALUES, min_size=least, max_size=most).flatmap(keywords)


#: Each signature with the calls that fit it.
SIGNATURES: dict[type[Adds], st.SearchStrategy[Call]] = {
    Positional: _calls(2, 2),
    Defaults: _calls(1, 3, late="bc"),
    Keywords: _calls(0, 0, "a", "b"),
    Everything: _calls(2, 5, "d", "eax"),
    Anything: _calls(0, 3, "", "ax"),
}


# ---- constructors


class Sized(nn.Module):
    """The end of every chain: a layer of its width, and what it was told."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, width), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class ByKeyword(Sized):
    def __init__(self, *, double: int, **options: Any) -> None:
        super().__init__(width=double * 2, **options)


class ByPosition(Sized):
    def __init__(self, half: int, /, *more: Any) -> None:
        super().__init__(half // 2 + 1, *more)


class BuildsFirst(Sized):
    """Makes a module of the same class as itself before its own constructor goes on."""

    def __init__(self, width: int, inside: bool = True) -> None:
        other = BuildsFirst(width + 1, inside=False) if inside else None
        Sized.__init__(self, width, scale=2.0)
        self.other = other


class ThroughNew(Sized):
    def __new__(cls, name: str = "", **more: Any) -> ThroughNew:
        return super().__new__(cls)

    def __init__(self, name: str, width: int = 3) -> None:
        super().__init__(width + len(name))


class NoInit(ByPosition):
    """Has no constructor of its own."""


class Deeper(ByKeyword):
    def __init__(self, depth: int = 1, **options: Any) -> None:
        self.__dict__["depth"] = depth
        super().__init__(double=depth, **options)


class Made(Sized):
    """Its `__new__` gives an object of another class, whose own constructor then runs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return Sized(*args, **kwargs)


def takes_named_locals(width: int, scale: float) -> Sized:
    """A function whose own names are those of the constructor's parameters."""
    inner = width + 1
    return ByPosition(inner)


WIDTHS = st.integers(1, 4)
_SCALE = st.fixed_dictionaries({}, optional={"scale": st.sampled_from([0.5, 2.0])})
#: Each class with the constructor calls that fit it.
CONSTRUCTORS: dict[type[nn.Module], st.SearchStrategy[Call]] = {
    Sized: st.tuples(st.tuples(WIDTHS), _SCALE)
    | st.tuples(st.just(()), _SCALE.flatmap(lambda s: WIDTHS.map(lambda w: {"width": w, **s}))),
    ByKeyword: _SCALE.flatmap(lambda s: WIDTHS.map(lambda w: ((), {"double": w, **s}))),
    ByPosition: st.tuples(st.tuples(WIDTHS) | st.tuples(WIDTHS, st.just(0.5)), st.just({})),
    BuildsFirst: st.tuples(
        st.tuples(WIDTHS), st.fixed_dictionaries({}, optional={"inside": st.booleans()})
    ),
    ThroughNew: st.tuples(
        st.tuples(st.text("ab", max_size=3)), st.fixed_dictionaries({}, optional={"width": WIDTHS})
    ),
    NoInit: st.tuples(st.tuples(WIDTHS), st.just({})),
    Deeper: st.tuples(st.tuples() | st.tuples(WIDTHS), _SCALE),
}
