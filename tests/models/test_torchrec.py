"""What is special about ranking models: jagged features, and tables that are shared."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
from tests.models import harness

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing it warns of its own dependencies
    pytest.importorskip("fbgemm_gpu")
    pytest.importorskip("torchrec")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_jagged_features_come_back_as_they_went_in(reports: dict[str, harness.Report]) -> None:
    from tests.models.zoo.recommendation import KEYS, batch

    entry = next(
        e for e in reports["dlrm, train"].entries if e.fqn.endswith("embedding_bag_collection")
    )
    (features,), _ = entry.inputs()
    expected: KeyedJaggedTensor = batch().sparse_features
    assert features.keys() == KEYS
    assert features.values().equal(expected.values())
    assert features.lengths().equal(expected.lengths())
    assert entry.outputs().keys() == KEYS
    changed = entry.metadata.calls[0].mutated
    assert changed == ("args[0]",)  # it fills the offsets that it needs


def test_a_table_of_two_features_is_called_twice(reports: dict[str, harness.Report]) -> None:
    calls = {
        c.fqn.rpartition(".")[2]: c.calls for c in reports["dlrm-shared-table, train"].coverage
    }
    assert calls["table_user_item"] == 2
    assert calls["table_shop"] == 1
