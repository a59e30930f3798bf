"""Type hints as values: they come back equal, and nothing else of typing does."""

from __future__ import annotations

import inspect
import typing as old
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from modulelens.errors import Corrupted, NotRebuildable
from modulelens.tree import Decoder, Encoder, Importer

t: Any = old  # the spellings of before, which libraries still use
HINTS: list[Any] = [
    *(t.Optional[Tensor], t.Union[int, Tensor, None], int | None, list[int]),
    *(t.List[str], t.Dict[str, t.List[int]], t.Tuple[()], tuple[int, ...]),
    *(t.Callable[[Tensor], int], t.Callable[..., Any], t.Callable[[], None]),
    *(t.Literal["a", 1], t.ClassVar[int], Sequence[Tensor], dict[str, list[Any]]),
    *(t.Union, t.Optional, t.List, t.Callable, t.Any),
    *(inspect.Parameter.empty, type(None)),
]


def decoded(structure: Any) -> Any:
    return Decoder(lambda ref: pytest.fail(f"{ref}"), Importer()).decode(structure)


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_it_comes_back(hint: Any) -> None:
    encoder = Encoder(lambda tensor: pytest.fail(f"{tensor}"))
    found = decoded(encoder.encode({"hint": hint, "all": (hint, [hint])}))
    assert found == {"hint": hint, "all": (hint, [hint])}
    assert not encoder.opaque


@pytest.mark.parametrize("path", ["inspect:getsource", "typing:get_type_hints", "inspect:os"])
def test_their_modules_give_nothing_else(path: str) -> None:
    with pytest.raises(NotRebuildable, match="outside the packages"):
        decoded({"$function": path})


@pytest.mark.parametrize("name", ["get_type_hints", "cast", "sys", "NamedTuple", "no_such_form"])
def test_a_form_is_a_form(name: str) -> None:
    with pytest.raises(Corrupted, match=f"typing.{name} is no form"):
        decoded({"$typing": name})
    with pytest.raises(Corrupted):
        decoded({"$hint": ["getsource", 1]})
