"""Limits on bytes: what is kept stays within them, and what is not is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.capture.loop import add_unverified
from torch import Tensor, nn

import modulelens as ml
from modulelens.errors import UsageError
from modulelens.records import tensor_refs
from modulelens.report.coverage import coverage_report
from modulelens.verify import grade

LAYER = 256 * 256 * 4
ROWS = 64 * 256 * 4


class Deep(nn.Module):
    """Four equal layers without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def kept(repo: Path, keep: ml.Keep, modules: str = "*") -> tuple[ml.Trace, dict[str, ml.Entry]]:
    torch.manual_seed(0)
    model = Deep()
    with ml.trace(model, name="m", keep=keep, modules=modules) as trace:
        model(torch.randn(64, 256))
    return trace, {entry.fqn: entry for entry in add_unverified(trace, repo)}


def stored(repo: Path) -> int:
    """Bytes of large blobs: those of tensors."""
    files = [f for f in (repo / "blobs").rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in files if f.stat().st_size > 60_000)


@pytest.mark.parametrize("limit", [ROWS, LAYER, 3 * LAYER, 4 * LAYER + 2 * ROWS, 100 * LAYER])
def test_a_trace_keeps_no_more_than_its_limit(limit: int, tmp_path: Path) -> None:
    trace, entries = kept(tmp_path, ml.Keep(max_bytes=limit))
    assert stored(tmp_path) <= limit
    total = 4 * LAYER + 5 * ROWS
    dropped = sum(item.dropped_bytes for item in trace.coverage)
    assert (dropped == 0) == (limit >= total)
    for item in trace.coverage:
        assert bool(item.dropped_bytes) == bool(item.reason)
        if item.reason:
            assert f"max_bytes={limit:,}" in item.reason
            assert item.fqn in coverage_report(trace.coverage)
    for fqn, entry in entries.items():
        entry.run()
        below = [c for c in trace.coverage if c.fqn.startswith(fqn) and c.dropped_bytes]
        assert bool(entry.metadata.warnings) == bool(below), fqn
        assert below or grade(entry._replay()).level == "exact", fqn


def test_a_module_keeps_no_more_than_its_limit(tmp_path: Path) -> None:
    trace, entries = kept(tmp_path, ml.Keep(max_module_bytes=LAYER + ROWS))
    # A layer's own weight fits, and then its input and output do not.
    for number in range(4):
        item = trace.coverage[f"layers.{number}"]
        why = f"max_module_bytes={LAYER + ROWS:,} is too little"
        assert item.reason == f"{why}: only shapes were kept of its inputs and outputs"
    assert trace.coverage["layers.1"].dropped_bytes
    assert entries["layers.1"].rebuild().weight.equal(trace.model.layers[1].weight)
    trace, entries = kept(tmp_path / "b", ml.Keep(max_module_bytes=3 * ROWS))
    assert "of its weights" in trace.coverage["layers.2"].reason
    assert trace.coverage["layers.2"].dropped_bytes == LAYER
    assert not entries["layers.2"].rebuild().weight.equal(trace.model.layers[2].weight)
    assert all(ref.kept for ref in tensor_refs(entries["layers.2"].metadata.calls[0].args))


def test_what_is_below_a_recorded_module_is_named_at_it(tmp_path: Path) -> None:
    trace, entries = kept(tmp_path, ml.Keep(max_bytes=3 * LAYER), modules="layers")
    assert "layers.3's weights" in trace.coverage["layers"].reason
    assert any("layers.3" in warning for warning in entries["layers"].metadata.warnings)
    assert entries["layers"].check().status is ml.Status.NOT_COMPARABLE


def test_bytes_that_another_module_keeps_anyway_are_kept(tmp_path: Path) -> None:
    _, entries = kept(tmp_path, ml.Keep(tensors="full", max_bytes=4 * LAYER + 3 * ROWS))
    # The root's input and output fit; so those of the first and last layer are there as well.
    assert entries[""].check().status is ml.Status.EXACT
    first = entries["layers.0"].metadata.calls[0]
    assert all(ref.kept for ref in tensor_refs(first.args))


@pytest.mark.parametrize("name", ["max_bytes", "max_module_bytes"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=0"):
        ml.Keep(**{name: 0})
