"""Functions made inside functions travel by the code of the function around them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from modulelens.errors import NotRebuildable
from modulelens.tree import Decoder, Encoder, Importer


def scaled(factor: float) -> Any:
    def times(value: float, plus: float = 0.5, *, minus: float = 0.25) -> float:
        return value * factor + plus - minus

    return times


def recursive() -> Any:
    def countdown(n: int) -> list[int]:
        return [n, *countdown(n - 1)] if n else [0]

    return countdown


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def doubled(*args: float) -> float:
        return 2 * function(*args)

    return doubled


class Maker:
    @staticmethod
    def negation() -> Any:
        return lambda value: -value

    def nested(self) -> Any:
        def middle(a: int) -> Any:
            def inner(b: int) -> int:
                return a * 10 + b

            return inner

        return middle(4)


def two_on_one_line() -> Any:
    return (lambda x: x + 1), (lambda x: x + 2)


def unfinished() -> Any:
    def early() -> int:
        return late

    encoded = Encoder(id).encode(early)
    late = 1
    return encoded, late


def there_and_back(value: Any) -> Any:
    encoder = Encoder(id)
    encoded = encoder.encode(value)
    assert not encoder.opaque
    return Decoder(lambda ref: ref, Importer(["tests"])).decode(encoded)


def test_a_closure_keeps_its_cells_and_defaults() -> None:
    made = there_and_back(scaled(3.0))
    assert made(2.0) == 6.25
    assert made(2.0, 1.0, minus=0.0) == 7.0


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (recursive(), (3,), [3, 2, 1, 0]),
        (wrapped(abs), (-3,), 6),
        (Maker.negation(), (5,), -5),
        (Maker().nested(), (2,), 42),
    ],
)
def test_every_kind_of_enclosure(function: Any, args: Any, expected: Any) -> None:
    assert there_and_back(function)(*args) == expected


def test_one_function_met_twice_stays_one() -> None:
    function = scaled(2.0)
    first, second = there_and_back([function, function])
    assert first is second


def test_what_cannot_be_told_apart_or_is_not_finished_is_refused() -> None:
    encoder = Encoder(id)
    encoder.encode(two_on_one_line()[0])
    assert "lambda" in encoder.opaque[0]
    assert "$opaque" in unfinished()[0]


def test_a_function_that_moved_is_named() -> None:
    encoded = Encoder(id).encode(Maker.negation())
    encoded["$local"]["steps"][0][1] += 1
    with pytest.raises(NotRebuildable, match="negation makes no <lambda>"):
        Decoder(lambda ref: ref, Importer(["tests"])).decode(encoded)


def test_its_package_has_to_be_allowed() -> None:
    encoded = Encoder(id).encode(Maker.negation())
    with pytest.raises(NotRebuildable, match="outside the packages"):
        Decoder(lambda ref: ref, Importer()).decode(encoded)
