"""Decoder, encoder, encoder-decoder and mixture of experts: traced, rebuilt and graded."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.models import harness
from tests.models.transformers_zoo import CASES

import modulelens as ml
from modulelens.records import GradeLevel, Reason

# transformers deprecates its own argument names from one release to the next.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
Reports = dict[str, harness.Report]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return harness.observe_all(CASES, ml.Repo(tmp_path_factory.mktemp("transformers") / "repo"))


@pytest.fixture(params=[case.name for case in CASES])
def report(request: pytest.FixtureRequest, reports: Reports) -> harness.Report:
    return reports[request.param]


def test_the_step_is_undisturbed(report: harness.Report) -> None:
    harness.assert_undisturbed(report)


def test_nothing_stays_installed(report: harness.Report) -> None:
    harness.assert_nothing_installed(report)


def test_every_module_is_exact_or_has_a_reason(report: harness.Report) -> None:
    harness.assert_faithful(report)


def test_gradients_are_exact_but_for_side_channels(report: harness.Report) -> None:
    if report.case.train:
        assert report.count("param_grads")["exact"] > 0.6 * len(report.entries)
    reasons = report.reasons("param_grads")
    allowed = {Reason.SHARED_PARAMETER.value}
    if report.case.name.startswith("mixtral"):
        # The router's logits reach the auxiliary loss through a hook, not through any output.
        allowed.add(Reason.GRADIENT_SIDE_CHANNEL.value)
        side = {f for f, (r, _) in reasons.items() if r == Reason.GRADIENT_SIDE_CHANNEL.value}
        layers = {"model.layers.0", "model.layers.1"}
        assert side == layers | {f"{layer}.mlp" for layer in layers}
    if report.case.name == "wav2vec2":
        # Its caller masks the projection's output in place.
        written = {"wav2vec2.feature_projection", "wav2vec2.feature_projection.projection"}
        modified = Reason.OUTPUT_MODIFIED_BY_CALLER.value
        assert {f for f, (r, _) in reasons.items() if r == modified} == written
        allowed.add(modified)
    assert {reason for reason, _ in reasons.values()} <= allowed


def test_a_tied_head_shares_its_parameter(reports: Reports) -> None:
    reasons = reports["bert"].reasons("param_grads")
    assert reasons["cls.predictions.decoder"][0] == Reason.SHARED_PARAMETER.value
    root = next(entry for entry in reports["bert"].entries if entry.fqn == "")
    assert root.grade.param_grads is GradeLevel.EXACT
    module = root.rebuild()
    assert module.cls.predictions.decoder.weight is module.bert.embeddings.word_embeddings.weight


def test_a_cache_is_filled_again(reports: Reports) -> None:
    for name in ("llama prefill", "llama cached"):
        changed = {e.fqn for e in reports[name].entries if e.metadata.calls[0].mutated}
        assert "model.layers.1.self_attn" in changed
        assert "model.layers.1.mlp" not in changed
        assert reports[name].count("buffers") == {"exact": len(changed), "none": 32 - len(changed)}


def test_recomputed_calls_are_no_calls(reports: Reports) -> None:
    for name in ("llama", "bert"):
        calls = {c.fqn: c.calls for c in reports[name].coverage}
        again = reports[f"{name} checkpointed"].coverage
        assert {c.fqn: c.calls for c in again} == calls
        assert sum(c.recomputes for c in again) > 20
        assert not sum(c.recomputes for c in reports[name].coverage)


def test_a_model_that_registers_itself_is_rebuilt_by_its_constructor(reports: Reports) -> None:
    ways = {e.fqn: e.grade.strategy for e in reports["mixtral"].entries}
    assert (ways[""], ways["model"]) == ("init", "init")
    assert set(ways.values()) == {"init", "structure"}
