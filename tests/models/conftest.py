"""A part of the zoo: observed once, graded by one worker."""

from __future__ import annotations

import importlib
import warnings

import pytest
from tests.models import harness
from tests.models.zoo.subset import RUNS, cases

import modulelens as ml

Reports = dict[str, harness.Report]


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Name and mode -> what was observed, for the libraries that are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, about their own futures
        return harness.observe_all(cases(), ml.Repo(tmp_path_factory.mktemp("zoo") / "repo"))


@pytest.fixture
def report(request: pytest.FixtureRequest, reports: Reports) -> harness.Report:
    """The report that the test's parameter names."""
    if request.param not in reports:
        try:
            importlib.import_module(RUNS[request.param])
        except (ImportError, OSError) as missing:
            pytest.skip(f"{RUNS[request.param]} cannot be imported: {missing}")
    return reports[request.param]
