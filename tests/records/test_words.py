"""Fates, statuses and grades read as their words, and coverage is found by fqn."""

from __future__ import annotations

import pytest

from modulelens.records import (
    Coverage,
    CoverageList,
    Fate,
    Grade,
    GradeLevel,
    Status,
    from_json,
    to_json,
)


def test_enums_print_and_compare_as_their_words() -> None:
    assert str(Status.EXACT) == f"{Status.EXACT}" == "EXACT"
    assert Fate.NOT_CALLED == "not called"
    assert to_json([Status.CLOSE]) == b'["CLOSE"]'


def test_a_grade_equals_its_level_and_grades_of_the_same_content() -> None:
    grade = Grade(level=GradeLevel.EXACT, strategy="init", reasons={"buffers": ("a", "b")})
    assert grade == "exact"
    assert grade != "close"
    assert grade == from_json(to_json(grade), Grade, what="a grade")
    assert grade != Grade(level=GradeLevel.EXACT, strategy="structure")
    assert len({grade, from_json(to_json(grade), Grade, what="a grade")}) == 1


def test_coverage_is_a_list_that_knows_fqns() -> None:
    rows = CoverageList(
        [
            Coverage(fqn="", cls="m:Net", fate=Fate.RECORDED),
            Coverage(fqn="a.b", cls="m:Head", fate=Fate.REFUSED, reason="script"),
        ]
    )
    assert rows["a.b"] is rows[1]
    assert str(rows["a.b"]) == "refused: script"
    assert rows.keys() == ["", "a.b"]
    assert dict(rows.items())[""].fate is Fate.RECORDED
    assert "a.b" in rows
    assert rows[0] in rows
    assert "a" not in rows
    with pytest.raises(KeyError):
        rows["a"]
