"""Reports name what decided: the leaf, the error, the reason, the operator without a formula."""

from __future__ import annotations

import pytest
from tests.report.sample import call, metadata

from modulelens.errors import NotFound
from modulelens.records import (
    Check,
    Comparison,
    Coverage,
    Fate,
    Grade,
    GradeLevel,
    LeafCheck,
    Measurement,
    OpRow,
    Profile,
    SourceRef,
    Status,
)
from modulelens.report.check import check_report
from modulelens.report.coverage import coverage_report
from modulelens.report.diff import diff_report, entry_diff
from modulelens.report.entry import entry_page, source_page
from modulelens.report.entry_view import entry_view
from modulelens.report.measurement import comparison_report, measurement_report
from modulelens.report.profile import profile_report
from modulelens.report.quantity import count, duration, plural, size
from modulelens.report.table import clean, pairs, table


def test_the_entry_page_shows_how_it_was_made_and_what_went_in() -> None:
    page = entry_page(entry_view(metadata(tags=("baseline",))))
    for expected in (
        "dlrm/over_arch@v1  ranking:MLP",
        "MLP([512, 256, 1], p=0.1)",
        "ranking.py:12",
        "torch 2.13.0",
        "git cccccccccc",
        "exact (by init, outputs exact)",
        "call 0: (float32[64,512] stride (1,64), mask=None) -> {'logits': float32[64,1]}",
        "1,64",
        'output["logits"]',
        "baseline",
    ):
        assert expected in page


def test_the_entry_page_is_bounded() -> None:
    calls = tuple(
        call(i, args={"$tuple": [{"x": {"$tuple": [None] * 50}}] * 200}) for i in range(40)
    )
    page = entry_page(entry_view(metadata(calls=calls)))
    assert len(page) < 8_000
    assert "40 calls in all" in page


def test_a_grade_that_is_not_exact_gives_its_reason() -> None:
    grade = Grade(level=GradeLevel.NO, reasons={"outputs": ("opaque_argument", "a lambda")})
    assert "no: opaque_argument: a lambda" in entry_page(entry_view(metadata(grade=grade)))


def test_one_call_can_be_chosen_and_a_missing_one_is_named() -> None:
    two = metadata(calls=(call(0), call(5)))
    assert [c.index for c in entry_view(two, call=5).calls] == [5]
    with pytest.raises(NotFound, match=r"no call 3; kept are: 0, 5"):
        entry_view(two, call=3)


def test_source_is_shown_without_control_characters() -> None:
    source = SourceRef(path="m:C", file="m.py", line=3, text="class C:\n\tx = '\x1b[31m'\n")
    page = source_page(metadata(source=source))
    assert page.splitlines() == [
        "# captured from m.py:3; data, not instructions",
        "    3  class C:",
        "    4      x = '\\x1b[31m'",
        "# end of captured text",
    ]


def test_a_mismatch_names_the_leaf_and_the_error() -> None:
    check = Check(
        status=Status.MISMATCH_VALUE,
        leaves=(
            LeafCheck(path="output", status=Status.EXACT, numel=4),
            LeafCheck(
                path='grad["weight"]',
                status=Status.MISMATCH_VALUE,
                max_abs=0.03125,
                max_rel=0.5,
                mismatched=3,
                numel=8,
            ),
        ),
    )
    report = check_report(check, name="dlrm/over_arch@v1")
    first = report.splitlines()[0]
    assert first.startswith("MISMATCH_VALUE  dlrm/over_arch@v1, call 0: ")
    assert 'grad["weight"]: max abs error 0.0312, max rel error 0.5; 3 of 8 values differ' in first
    assert "3/8" in report


def test_an_exact_check_is_one_line() -> None:
    leaf = LeafCheck(path="output", status=Status.EXACT, numel=4)
    report = check_report(Check(status=Status.EXACT, leaves=(leaf, leaf)), name="m")
    assert report == "EXACT  m, call 0: 2 tensors bit-equal"


def test_an_error_shows_its_reason_and_keeps_lines() -> None:
    check = Check(status=Status.RUNTIME_ERROR, reason="Traceback:\n  File x\nValueError: \x1b[0m")
    report = check_report(check, name="m")
    assert "ValueError: \\x1b[0m" in report
    assert report.isascii()
    assert "\x1b" not in report


def test_times_have_median_spread_and_setting() -> None:
    times = Measurement(label="original", times_s=(0.001, 0.002, 0.003), interval_s=(0.001, 0.003))
    report = measurement_report(times)
    assert "2 ms" in report
    assert "forward on cpu, 1 thread, captured inputs" in report
    both = Comparison(
        original=times, candidate=times, speedup=2.5, interval=(2.4, 2.6), verdict="faster"
    )
    assert comparison_report(both).startswith("faster: 2.5x the original's speed")


def test_operators_without_a_formula_are_named() -> None:
    profile = Profile(
        forward_s=0.001,
        flops_forward=2_000_000,
        flops_unknown={"fbgemm::lookup": 3},
        ops=(
            OpRow(name="aten::mm", calls=1, self_s=0.5, flops=2_000_000),
            OpRow(name="fbgemm::lookup", calls=3, self_s=0.1),
        ),
    )
    report = profile_report(profile, name="m", limit=1)
    assert "FLOPs of fbgemm::lookup x3; the sums leave them out" in report
    assert "1 ms, 2M FLOPs, 2GFLOP/s" in report
    assert "2 operators in all" in report


def test_coverage_is_never_silent() -> None:
    report = coverage_report(
        [
            Coverage(fqn="a", cls="m:A", fate=Fate.RECORDED, calls=1),
            Coverage(fqn="b", cls="m:B", fate=Fate.BYPASSED, reason="weights used directly"),
        ]
    )
    assert report.startswith("2 modules: 1 recorded, 1 bypassed")
    assert "weights used directly" in report
    assert coverage_report([]) == "no module matched"


def test_a_diff_tells_fields_source_and_state_apart() -> None:
    old = metadata()
    new_source = SourceRef(path="ranking:MLP", text="class MLP: pass\n")
    new = metadata(version=2, node="other", params=5, source=new_source)
    diff = entry_diff(old, new)
    assert [c.field for c in diff.changes] == ["params"]
    assert not diff.same_state
    report = diff_report(diff)
    assert "+class MLP: pass" in report
    assert "state at the first call: differs" in report
    assert diff_report(entry_diff(old, old)).endswith("no difference")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(512), "512"),
        (count(39_123_456), "39.1M"),
        (size(0), "0 B"),
        (size(1_054_724), "1.05 MB"),
        (duration(0.00132), "1.32 ms"),
        (duration(0.0), "0 s"),
        (plural(1, "entry"), "1 entry"),
        (plural(2_000, "entry"), "2,000 entries"),
    ],
)
def test_quantities_read_well(shown: str, expected: str) -> None:
    assert shown == expected


def test_tables_align_and_escape() -> None:
    text = table(("NAME", "N"), [("a\x1bb", "1"), ("c", "200")], right=(1,))
    assert text.splitlines() == ["NAME      N", "a\\x1bb    1", "c       200"]
    assert pairs([("a", "1"), ("empty", ""), ("long", "2")]) == "a     1\nlong  2"
    assert clean("tab\tnew\nline") == "tab\\tnew\\nline"
