"""The filter language: its meaning, and that the index agrees with it on anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.samples import row

from modulelens.errors import UsageError
from modulelens.store import Row, matches, parse_terms
from modulelens.store.facts import FIELDS, Kind
from modulelens.store.index import Index
from modulelens.store.layout import open_layout

EXAMPLE = row(
    cls="shop.ranking:Attention",
    params=1000,
    dtypes=("bfloat16", "float32"),
    input_shape=("2x64", "scalar"),
    tags=("base", "fast"),
    grade="exact",
    latency_s=0.5,
    date="2026-01-02T03:04:05.678Z",
)


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({}, True),
        ({"cls": "Attention"}, True),
        ({"cls": "shop.ranking:Attention"}, True),
        ({"cls": "ranking"}, False),
        ({"cls": {"$ne": "Attention"}}, False),
        ({"cls": {"$in": ["MLP", "Attention"]}}, True),
        ({"cls": {"$regex": "^Att"}}, True),
        ({"cls": {"$contains": "ranking"}}, True),
        ({"params": {"$gt": 999, "$le": 1e3}}, True),
        ({"params": {"$gte": 1000, "$lt": 1000}}, False),
        ({"params": 1000.0}, True),
        ({"params": {"$lt": 10**40}}, True),
        ({"params": {"$gt": -float("inf")}}, True),
        ({"dtypes": "bfloat16"}, True),
        ({"dtypes": {"$ne": "bfloat16"}}, False),
        ({"dtypes": {"$contains": "float16"}}, False),
        ({"dtypes": {"$regex": "float16"}}, True),
        ({"input.shape": "2x64"}, True),
        ({"input_shape": {"$in": ["3", "scalar"]}}, True),
        ({"output.shape": {"$exists": False}}, True),
        ({"tags": {"$contains": "base"}, "grade": "exact"}, True),
        ({"grade": {"$ne": "exact"}}, False),
        ({"reason": {"$ne": "exact"}}, True),
        ({"reason": None}, True),
        ({"flops": {"$exists": False}}, True),
        ({"flops": {"$lt": 5}}, False),
        ({"flops": {"$not": {"$lt": 5}}}, True),
        ({"date": {"$ge": "2026-01", "$lt": "2026-02"}}, True),
        ({"$or": [{"params": 1}, {"fqn": "f"}]}, True),
        ({"$or": []}, False),
        ({"$and": []}, True),
        ({"$not": {"fqn": "f"}}, False),
        ({"id": "0" * 32 + "/1", "name": {"$regex": "/f$"}}, True),
    ],
)
def test_meaning(filter, expected):
    assert matches(EXAMPLE, filter) is expected


@pytest.mark.parametrize(
    ("filter", "suggestion"),
    [
        ({"parms": 1}, "params"),
        ({"input.dtyp": "x"}, "input.dtype"),
        ({"params": {"$gtt": 1}}, "$gt"),
        ({"$nand": []}, "$and"),
        ({"params": "many"}, None),
        ({"params": True}, None),
        ({"params": float("nan")}, None),
        ({"params": {"$regex": "1"}}, None),
        ({"cls": 3}, None),
        ({"cls": "\ud800"}, None),
        ({"cls": {"$regex": "("}}, None),
        ({"cls": {"$in": "MLP"}}, None),
        ({"cls": {}}, None),
        ({"cls": {"$exists": 1}}, None),
        ({"cls": ["a"]}, None),
        ({"$and": {}}, None),
        ({3: 3}, None),
        ([], None),
        ({"$or": [{"fqn": "x"}] * 501}, None),
    ],
)
def test_what_cannot_be_asked_is_refused(filter, suggestion):
    with pytest.raises(UsageError) as caught:
        matches(EXAMPLE, filter)
    assert suggestion is None or suggestion in caught.value.did_you_mean


def test_too_deep_is_refused():
    deep = {"fqn": "x"}
    for _ in range(2000):
        deep = {"$not": deep}
    with pytest.raises(UsageError):
        matches(EXAMPLE, deep)


def test_terms():
    terms = ["params>1e6", "input.dtype=bfloat16", "cls~Attn.*", "grade!=exact", "tags:baseline"]
    assert parse_terms(terms) == {
        "$and": [
            {"params": {"$gt": 1000000}},
            {"input.dtype": {"$eq": "bfloat16"}},
            {"cls": {"$regex": "Attn.*"}},
            {"grade": {"$ne": "exact"}},
            {"tags": {"$contains": "baseline"}},
        ]
    }
    assert parse_terms([]) == {}
    assert parse_terms([" latency_s <= 0.5 "]) == {"latency_s": {"$le": 0.5}}
    assert parse_terms(["fqn=a=b>c"]) == {"fqn": {"$eq": "a=b>c"}}
    for term in ("params", "params>", "params>many", "parms>1", "cls~(", "=3", "params>nan"):
        with pytest.raises(UsageError):
            parse_terms([term])


# Few letters, so that values meet; NUL, quotes, digits and non-ASCII, which SQL may take badly.
TEXTS = st.text(alphabet="ab:.A0\0'%_\N{SNOWMAN}\U0001f600\n", max_size=4)
WORDS = st.sampled_from(["a", "pkg.m:Ab", "Ab", "float32", "bfloat16", ""]) | TEXTS
NUMBERS = st.integers(-3, 3) | st.integers(2**53 - 1, 2**63 - 1) | st.floats(-2, 2)
REGEXES = st.sampled_from(["a", "^a", "b$", "A.", "[ab]0?", "", "(?i)AB", r"\.", "\N{SNOWMAN}"])


def values(annotation: str) -> st.SearchStrategy:
    some: st.SearchStrategy = WORDS
    if annotation.startswith("tuple"):
        return st.lists(WORDS, max_size=3).map(tuple)
    if not annotation.startswith("str"):
        some = NUMBERS.map(float if "float" in annotation else int)
    return st.none() | some if "None" in annotation else some


ROWS = st.builds(
    row,
    **{
        field: values(annotation)
        for field, annotation in Row.__annotations__.items()
        if field not in ("id", "version")
    },
)


@st.composite
def conditions(draw: st.DrawFn) -> dict:
    field = draw(st.sampled_from(sorted(FIELDS)))
    number = FIELDS[field] is Kind.NUMBER
    value = NUMBERS | st.just(10**30) | st.just(float("-inf")) if number else WORDS
    operators = {
        "$eq": st.none() | value,
        "$ne": st.none() | value,
        "$lt": value,
        "$lte": value,
        "$gt": value,
        "$ge": value,
        "$in": st.lists(st.none() | value, max_size=3),
        "$exists": st.booleans(),
    }
    if not number:
        operators |= {"$contains": WORDS, "$regex": REGEXES}
    op = draw(st.sampled_from(sorted(operators)))
    test = {op: draw(operators[op])}
    return {field: {"$not": test} if draw(st.booleans()) else test}


FILTERS = st.recursive(
    conditions(),
    lambda part: st.one_of(
        st.lists(part, max_size=3).map(lambda parts: {"$and": parts}),
        st.lists(part, max_size=3).map(lambda parts: {"$or": parts}),
        part.map(lambda inner: {"$not": inner}),
        st.tuples(part, part).map(lambda two: {**two[0], **two[1]}),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Iterator[tuple[Index, dict[int, Row]]]:
    rows: dict[int, Row] = {}
    layout = open_layout(tmp_path_factory.mktemp("query") / "repo")
    index = Index(layout, lambda _, __: rows, writable=True)
    yield index, rows
    index.close()


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=4), filters=st.lists(FILTERS, max_size=8))
def test_the_index_agrees_with_the_evaluator(shelf, rows, filters):
    index, current = shelf
    current.clear()
    for version, found in enumerate(rows, 1):
        fields = {field: getattr(found, field) for field in FIELDS}
        current[version] = Row(**fields | {"version": version, "id": f"{'0' * 32}/{version}"})
    assert index.refresh({"0" * 32: None})
    for filter in filters:
        expected = {v: r for v, r in current.items() if matches(r, filter)}
        assert {r.version: r for r in index.find(filter)} == expected, filter
        assert index.count(filter) == len(expected)


def test_a_regex_matches_no_missing_value(shelf):
    index, current = shelf
    current.clear()
    current[1] = row(date=None)
    assert index.refresh({"0" * 32: None})
    assert index.count({"date": {"$regex": ""}}) == 0
