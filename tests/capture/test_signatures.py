"""Any call signature and any constructor signature is recorded as it was called, and called so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.capture.loop import add_unverified, faults, graded, rows, same, verify
from tests.capture.signatures import (
    CONSTRUCTORS,
    SIGNATURES,
    Adds,
    ByPosition,
    Call,
    Hands,
    Made,
    Sized,
    takes_named_locals,
)
from torch import nn

import modulelens as ml
from modulelens.records import Status

quiet = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signatures")


@pytest.fixture(scope="module")
def entries(repo: Path) -> Iterator[list[ml.Entry]]:
    """What the tests stored; all of it is replayed in one other process when they are over."""
    stored: list[ml.Entry] = []
    yield stored
    verify(repo, stored)
    assert {e.name: faults(e.grade) for e in stored if faults(e.grade)} == {}


@pytest.mark.parametrize("cls", SIGNATURES)
def test_a_call_is_recorded_as_it_was_made(
    cls: type[Adds], entries: list[ml.Entry], repo: Path
) -> None:
    @quiet
    @given(SIGNATURES[cls])
    def one(call: Call) -> None:
        args, kwargs = call
        model = Hands(cls())
        with ml.trace(model, name=f"{cls.__name__}{len(entries)}") as trace:
            expected = model(*args, **kwargs)
        added = add_unverified(trace, repo)
        for entry in added[:2]:
            assert same(entry.inputs(), (args, kwargs))
        assert same(added[0].run().detach(), expected.detach())
        entries.extend(added)

    one()


def constructed(entry: ml.Entry) -> Any:
    """The arguments of the entry's constructor call."""
    init, replay = entry.metadata.init, entry._replay()
    assert init is not None
    return tuple(map(replay.value, init.args)), {k: replay.value(v) for k, v in init.kwargs.items()}


@pytest.mark.parametrize("cls", CONSTRUCTORS)
def test_the_outermost_constructor_call_is_recorded_as_it_was_made(
    cls: type[nn.Module], entries: list[ml.Entry], repo: Path
) -> None:
    @quiet
    @given(CONSTRUCTORS[cls])
    def one(call: Call) -> None:
        args, kwargs = call
        with ml.track_init():
            model = cls(*args, **kwargs)
        with ml.trace(model, name=f"{cls.__name__}{len(entries)}") as trace:
            expected = model(rows())
        entry = add_unverified(trace, repo)[0]
        assert entry.cls.endswith(f":{cls.__name__}")
        assert constructed(entry) == (args, kwargs)
        for strategy in ("structure", "init"):
            module = entry.rebuild(strategy=strategy)
            assert type(module) is cls
            assert same(entry.run(module).detach(), expected.detach())
        entries.append(entry)

    one()


def test_the_record_is_that_of_the_object_that_exists_not_of_the_class_asked_for(
    tmp_path: Path,
) -> None:
    with ml.track_init():
        model: Any = Made(3, scale=0.5)
    with ml.trace(model) as trace:
        model(rows())
    entry = graded(trace, tmp_path)[""]
    assert (entry.cls, constructed(entry)) == (
        "tests.capture.signatures:Sized",
        ((3,), {"scale": 0.5}),
    )
    assert faults(entry.grade) == ""
    assert type(entry.rebuild(strategy="init")) is Sized


def test_names_of_the_callers_are_no_arguments(tmp_path: Path) -> None:
    with ml.track_init():
        model = takes_named_locals(width=64, scale=9.0)
    with ml.trace(model) as trace:
        model(rows())
    entry = graded(trace, tmp_path)[""]
    assert constructed(entry) == ((65,), {})
    assert entry.check().status is Status.EXACT
    assert isinstance(entry.rebuild(strategy="init"), ByPosition)


@quiet
@given(st.data())
def test_copies_carry_the_call_of_their_original(data: st.DataObject) -> None:
    import copy

    from modulelens.capture.init import init_call

    cls = data.draw(st.sampled_from(list(CONSTRUCTORS)))
    args, kwargs = data.draw(CONSTRUCTORS[cls])
    with ml.track_init():
        original = cls(*args, **kwargs)
    twin = copy.deepcopy(original)
    calls = [init_call(m, lambda _: None, lambda _: None) for m in (original, twin)]  # type: ignore[arg-type,return-value]
    assert [c and (c.args, c.kwargs, c.how) for c in calls] == [
        (list(args), kwargs, how) for how in ("constructed", "copied")
    ]
