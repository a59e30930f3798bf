"""Capture on CUDA, rebuild there and on the CPU. `scripts/gpu-check` runs these and a benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modulelens as ml
from modulelens.records import Fate

pytestmark = pytest.mark.gpu
GRADS = ml.Keep(grads=True)


class Mixed(nn.Module):
    """Dropout, batch statistics, attention, and an activation that overwrites its input."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(2 * width)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(2 * width, width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.drop(self.norm(self.act(self.up(x)))))
        mixed, _ = self.attend(y[None], y[None], y[None], need_weights=False)
        return mixed[0] + y


def stepped(model: nn.Module, trace: object = None, *, half: bool = False) -> list[Tensor]:
    """Losses and gradients of two steps, the second one under `trace`."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for number in range(2):
        x = torch.randn(32, 64, device="cuda")
        around = trace if number and trace is not None else torch.enable_grad()
        with around, torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):  # type: ignore[attr-defined]
            loss = model(x).float().square().mean()
            loss.backward()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad()
        x.zero_()  # what was captured of it is a copy by now, or ordered before this
    return found


@pytest.mark.parametrize("half", [False, True])
def test_a_traced_step_is_the_same_and_every_module_is_exact(half: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = Mixed().cuda(), Mixed().cuda()
    model.load_state_dict(plain.state_dict())
    trace = ml.trace(model, name="m", keep=GRADS)
    for one, two in zip(stepped(plain, half=half), stepped(model, trace, half=half), strict=True):
        assert one.equal(two)
    entries = ml.Repo(tmp_path / "repo").add(trace)
    assert all(e.metadata.calls[0].context.rng.devices for e in entries)
    for entry in entries:
        check = entry.check(backward=True)
        assert check.status.passed, (entry, check)
        there = entry.rebuild(device="cuda")
        assert all(p.is_cuda for p in there.parameters())
        here = entry.rebuild()
        assert all(not p.is_cuda for p in here.parameters())


def test_rebuilt_on_the_cpu_it_is_close_and_says_where_it_ran(tmp_path: Path) -> None:
    model = Mixed().cuda().eval()
    with ml.trace(model, name="m") as trace, torch.no_grad():
        model(torch.randn(32, 64, device="cuda"))
    repo = ml.Repo(tmp_path / "repo")
    repo.add(trace, verify=False)
    check = repo["m/down"].check()
    assert check.status.passed
    assert any("captured on cuda" in text for text in check.warnings)


def test_a_call_while_a_graph_is_captured_is_refused_with_the_reason() -> None:
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with ml.trace(model) as trace, torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    torch.cuda.synchronize()
    assert y.equal(model(x))
    assert trace.coverage[""].fate is Fate.REFUSED
    assert "CUDA graph" in trace.coverage[""].reason
