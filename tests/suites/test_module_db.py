"""torch's own module tests, a few samples of each: everything is rebuilt bit for bit.

`benchmarks/module_db.py` runs all samples; `docs/module-db.md` holds what it printed.
"""

from __future__ import annotations

import pytest
from tests.suites import module_db

import modulelens as ml

SAMPLES = 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[module_db.Row]:
    repo = ml.Repo(tmp_path_factory.mktemp("module-db"))
    return module_db.sweep(repo, module_db.cases(SAMPLES))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_module_info_is_there_in_both_modes(rows: list[module_db.Row]) -> None:
    roots = {row.case.rpartition(".")[0] for row in rows if not row.fqn}
    wanted = {f"{info.name}.{mode}" for info in module_db.module_db for mode in ("train", "eval")}
    assert roots == wanted


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("aspect", ["all", *module_db.ASPECTS])
def test_modules_are_graded_exact(rows: list[module_db.Row], aspect: str) -> None:
    exact, graded = module_db.shares(rows)[aspect]
    assert graded, "nothing was graded"
    assert exact == graded, module_db.named(rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_and_buffers_are_graded_where_there_are_any(rows: list[module_db.Row]) -> None:
    # The denominators must not shrink unseen: a gradient that is not graded is no exact one.
    found = module_db.shares(rows)
    assert found["param_grads"][1] == sum(row.with_gradients for row in rows) > 250
    assert found["buffers"][1] >= 3
