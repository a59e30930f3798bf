"""A ranking model with embedding tables and jagged features: traced, rebuilt and graded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
from tests.models import harness

import modulelens as ml

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = ["dlrm", "dlrm bf16", "dlrm shared table", "dlrm cross"]
Reports = dict[str, harness.Report]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns of its own dependencies
        pytest.importorskip("fbgemm_gpu")
        pytest.importorskip("torchrec")
        from tests.models.torchrec_zoo import CASES

        assert [case.name for case in CASES] == NAMES
        repo = ml.Repo(tmp_path_factory.mktemp("torchrec") / "repo")
        return harness.observe_all(CASES, repo)


@pytest.fixture(params=NAMES)
def report(request: pytest.FixtureRequest, reports: Reports) -> harness.Report:
    return reports[request.param]


def test_the_step_is_undisturbed(report: harness.Report) -> None:
    harness.assert_undisturbed(report)


def test_nothing_stays_installed(report: harness.Report) -> None:
    harness.assert_nothing_installed(report)


def test_every_module_is_exact(report: harness.Report) -> None:
    harness.assert_faithful(report, share=1.0)
    assert set(report.count("buffers")) <= {"exact", "none"}
    assert set(report.count("param_grads")) == {"exact", "none"}
    assert not report.reasons("param_grads")


def test_jagged_features_come_back_as_they_went_in(reports: Reports) -> None:
    from tests.models.torchrec_zoo import KEYS, batch

    entry = next(e for e in reports["dlrm"].entries if e.fqn.endswith("embedding_bag_collection"))
    (features,), _ = entry.inputs()
    expected: KeyedJaggedTensor = batch().sparse_features
    assert features.keys() == KEYS
    assert features.values().equal(expected.values())
    assert features.lengths().equal(expected.lengths())
    assert entry.outputs().keys() == KEYS
    changed = entry.metadata.calls[0].mutated
    assert changed == ("args[0]",)  # it fills the offsets that it needs


def test_a_table_of_two_features_is_called_twice(reports: Reports) -> None:
    calls = {c.fqn.rpartition(".")[2]: c.calls for c in reports["dlrm shared table"].coverage}
    assert calls["table_user_item"] == 2
    assert calls["table_shop"] == 1
