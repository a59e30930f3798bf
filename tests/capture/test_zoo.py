"""Each module of the zoo: its step is the same with and without a trace, and its entries replay."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.capture.cases import CASES
from tests.capture.loop import (
    Left,
    add_unverified,
    build,
    faults,
    hooks_of,
    run,
    same,
    verify,
)
from torch import nn

import modulelens as ml
from modulelens.records import Coverage, Fate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Lazy modules:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


@dataclasses.dataclass
class Seen:
    model: nn.Module
    plain: Left
    traced: Left
    hooks: tuple[dict[str, int], dict[str, int]]
    coverage: list[Coverage]
    entries: list[ml.Entry]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen | Exception]:
    """Every case, traced in this process and graded in one other."""
    repo: Path = tmp_path_factory.mktemp("zoo")
    found = {name: observe(name, repo) for name in CASES}
    entries = [e for one in found.values() if isinstance(one, Seen) for e in one.entries]
    verify(repo, entries)
    return found


def observe(name: str, repo: Path) -> Seen | Exception:
    case = CASES[name]
    try:
        untraced = build(case)
        plain = run(case, untraced)
        model = build(case)
        trace = ml.trace(model, name=name, keep=ml.Keep(grads=True), warmup=case.warmup)
        traced = run(case, model, trace)
        entries = add_unverified(trace, repo)
        return Seen(
            model, plain, traced, (hooks_of(untraced), hooks_of(model)), trace.coverage, entries
        )
    except Exception as error:  # noqa: BLE001 - raised again by the tests of this case
        return error


@pytest.fixture
def one(request: pytest.FixtureRequest, seen: dict[str, Seen | Exception]) -> Seen:
    found = seen[request.param]
    if isinstance(found, Exception):
        raise found
    return found


every_case = pytest.mark.parametrize("one", CASES, indirect=True)


@every_case
def test_the_step_is_bit_for_bit_what_it_is_without_a_trace(one: Seen) -> None:
    for field in dataclasses.fields(Left):
        plain, traced = getattr(one.plain, field.name), getattr(one.traced, field.name)
        assert same(plain, traced), field.name
    assert one.hooks[0] == one.hooks[1]


@every_case
def test_every_module_has_a_fate_and_a_recorded_one_has_an_entry(one: Seen) -> None:
    assert [c.fqn for c in one.coverage] == [fqn for fqn, _ in one.model.named_modules()]
    recorded = [c.fqn for c in one.coverage if c.fate is Fate.RECORDED]
    assert recorded == [e.fqn for e in one.entries]
    assert all(c.reason for c in one.coverage if c.fate is not Fate.RECORDED)


@pytest.mark.parametrize(("one", "name"), [(n, n) for n in CASES], indirect=["one"])
def test_what_was_recorded_replays_exactly_or_says_why_not(one: Seen, name: str) -> None:
    wrong = {e.fqn: faults(e.grade) for e in one.entries if faults(e.grade)}
    assert wrong.keys() == CASES[name].spoiled.keys(), wrong
    for fqn, reason in CASES[name].spoiled.items():
        assert reason in wrong[fqn]
    missing = [e for e in one.entries if e.grade and e.grade.reasons.get("param_grads", "")]
    unkept = {e.fqn for e in missing if e.grade and e.grade.reasons["param_grads"][0] == "not_kept"}
    assert unkept == set(CASES[name].ungraded)
