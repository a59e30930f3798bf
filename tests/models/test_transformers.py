"""What is special about transformers models: caches, tied heads, recomputation, registries."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.models import harness

from modulelens.records import GradeLevel, Reason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_tied_head_shares_its_parameter(reports: dict[str, harness.Report]) -> None:
    reasons = reports["bert, train"].reasons("param_grads")
    assert reasons["cls.predictions.decoder"][0] == Reason.SHARED_PARAMETER.value
    root = next(entry for entry in reports["bert, train"].entries if entry.fqn == "")
    assert root.grade.param_grads is GradeLevel.EXACT
    module = root.rebuild()
    assert module.cls.predictions.decoder.weight is module.bert.embeddings.word_embeddings.weight


def test_a_cache_is_filled_again(reports: dict[str, harness.Report]) -> None:
    entries = reports["llama, eval"].entries
    changed = {e.fqn for e in entries if e.metadata.calls[0].mutated}
    assert "model.layers.1.self_attn" in changed
    assert "model.layers.1.mlp" not in changed
    assert reports["llama, eval"].count("buffers")["exact"] == len(changed)


def test_a_token_after_a_prompt_finds_the_cache_that_the_prompt_filled(
    reports: dict[str, harness.Report],
) -> None:
    root = next(e for e in reports["llama, eval"].entries if e.fqn == "")
    _, given = root.inputs()
    assert root.metadata.step == 1
    assert given["input_ids"].shape == (2, 1)
    cache = next(value for value in given.values() if hasattr(value, "get_seq_length"))
    assert cache.get_seq_length() == 12


def test_recomputed_calls_are_no_calls(reports: dict[str, harness.Report]) -> None:
    for name in ("llama", "bert"):
        calls = {c.fqn: c.calls for c in reports[f"{name}, train"].coverage}
        again = reports[f"{name}, checkpoint"].coverage
        assert {c.fqn: c.calls for c in again} == calls
        assert sum(c.recomputes for c in again) > 20
        assert not sum(c.recomputes for c in reports[f"{name}, train"].coverage)


def test_gradients_that_pass_no_output_are_named(reports: dict[str, harness.Report]) -> None:
    reasons = reports["mixtral, train"].reasons("param_grads")
    side = {f for f, (r, _) in reasons.items() if r == Reason.GRADIENT_SIDE_CHANNEL.value}
    layers = {"model.layers.0", "model.layers.1"}
    assert side == layers | {f"{layer}.mlp" for layer in layers}
    reasons = reports["wav2vec2, train"].reasons("param_grads")
    written = {f for f, (r, _) in reasons.items() if r == Reason.OUTPUT_MODIFIED_BY_CALLER.value}
    assert written == {"wav2vec2.feature_projection", "wav2vec2.feature_projection.projection"}


def test_a_model_that_registers_itself_is_rebuilt_by_its_constructor(
    reports: dict[str, harness.Report],
) -> None:
    ways = {e.fqn: e.grade.strategy for e in reports["mixtral, train"].entries}
    assert (ways[""], ways["model"]) == ("init", "init")
    assert set(ways.values()) == {"init", "structure"}
