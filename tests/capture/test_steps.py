"""Where a step begins and ends, what of it is kept, and what becomes of each module."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, faults, graded, hooks_of, rows
from torch import Tensor, nn

import modulelens as ml
from modulelens.errors import NotFound, UsageError
from modulelens.records import Fate


def model_and_optimizer(lr: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns every few instructions, so that a race is met."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def weight(entry: ml.Entry, call: int = 0) -> Tensor:
    return next(entry.rebuild(call=call).parameters()).detach()


def test_state_is_that_of_the_call_though_the_optimizer_moved_it_since(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    before = copy.deepcopy(model.state_dict())
    with ml.trace(model) as trace:
        model(rows()).sum().backward()
        optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight)
    entries = {e.fqn: e for e in add_unverified(trace, tmp_path / "repo")}
    rebuilt = entries[""].rebuild().state_dict()
    assert all(torch.equal(rebuilt[name], before[name]) for name in before)
    assert entries["1"].rebuild().num_batches_tracked == 0


def test_steps_after_the_traced_one_are_let_alone() -> None:
    model, optimizer = model_and_optimizer()
    plain = hooks_of(model)
    with ml.trace(model, warmup=2, steps=2) as trace:
        for step in range(6):
            model(rows()).sum().backward()
            optimizer.step()
            assert trace.done == (step >= 3)
            if trace.done:
                assert hooks_of(model) == plain
    assert [call.step for call in trace.captures[0].calls] == [0, 1]
    assert len(trace.watches) == 2


def test_two_traced_steps_hold_two_states(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    weights = []
    with ml.trace(model, steps=2) as trace:
        for _ in range(2):
            weights.append(model[0].weight.detach().clone())
            model(rows()).sum().backward()
            optimizer.step()
    entries = graded(trace, tmp_path / "repo")
    assert torch.equal(weight(entries["0"], 0), weights[0])
    assert torch.equal(weight(entries["0"], 1), weights[1])
    assert not any(faults(e.grade) for e in entries.values())


def test_the_optimizer_of_another_model_does_not_end_the_step() -> None:
    model, optimizer = model_and_optimizer()
    other, other_optimizer = model_and_optimizer()
    with ml.trace(model, steps=2, keep=ml.Keep(grads=True)) as trace:
        out = model(rows())
        other(rows()).sum().backward()
        other_optimizer.step()
        assert not trace.watches
        out.sum().backward()
        optimizer.step()
        assert len(trace.watches) == 1
    assert trace.captures[0].calls[0].grad_output


def test_gradient_accumulation_is_one_step_per_forward_and_sums_what_each_gave(
    tmp_path: Path,
) -> None:
    model, optimizer = model_and_optimizer()
    with ml.trace(model, steps=2, keep=ml.Keep(grads=True)) as trace:
        for factor in (1.0, 2.0):
            (model(rows()).sum() * factor).backward()
        optimizer.step()
    assert [call.step for call in trace.captures[0].calls] == [0, 1]
    entry = graded(trace, tmp_path / "repo")["2"]
    assert [entry.grads(call)["outputs"]["0"].flatten()[0] for call in (0, 1)] == [1.0, 2.0]


def test_the_closure_of_lbfgs_runs_the_model_many_times_within_the_optimizer(
    tmp_path: Path,
) -> None:
    model, _ = model_and_optimizer()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(rows()).square().sum()
        loss.backward()
        seen.append(loss)
        return loss

    with ml.trace(model, steps=2) as trace:
        optimizer.step(closure)
    assert len(seen) > 2
    assert len(trace.watches) == 2
    assert not any(faults(e.grade) for e in graded(trace, tmp_path / "repo").values())


def test_a_block_that_ends_after_the_forward_is_a_whole_step(tmp_path: Path) -> None:
    with ml.trace(zoo.CalledTwice().eval()) as trace, torch.no_grad():
        trace.model(rows())
    assert [c.fqn for c in trace.captures] == ["", "layer", "drop"]
    assert len(trace.captures[1].calls) == 2


def test_a_block_without_a_step_says_so() -> None:
    model, _ = model_and_optimizer()
    none = "no step of Sequential was traced: 0 step"
    with pytest.warns(UserWarning, match=none), ml.trace(model) as trace:
        pass
    assert not trace.captures
    assert {c.fate for c in trace.coverage} == {Fate.NOT_CALLED}
    few = r"1 step\(s\) were seen, warmup is 3"
    with pytest.warns(UserWarning, match=few), ml.trace(model, warmup=3):
        model(rows())
    assert hooks_of(model) == {}


def test_more_calls_than_asked_for_are_counted_not_kept(tmp_path: Path) -> None:
    model = zoo.CountsInChild()
    with ml.trace(model, keep=ml.Keep(max_calls=2)) as trace:
        model(rows())
    inner = {c.fqn: c for c in trace.captures}["inner"]
    assert (len(inner.calls), inner.dropped_calls) == (2, 1)
    coverage = {c.fqn: c for c in trace.coverage}["inner"]
    assert (coverage.calls, coverage.dropped_calls) == (2, 1)
    entries = graded(trace, tmp_path / "repo")
    assert entries["inner"].metadata.dropped_calls == 1
    assert not any(faults(e.grade) for e in entries.values())
    with pytest.raises(NotFound, match=r"2 call\(s\), 1 more were not kept; there is no call 2"):
        entries["inner"].inputs(2)


def test_every_fate_is_told_with_its_reason() -> None:
    model = zoo.CallsAnotherMethod()
    with ml.trace(model) as trace:
        model(rows()).sum().backward()
    fates = {c.fqn: (c.fate, c.reason) for c in trace.coverage}
    assert fates["members.0"] == (Fate.RECORDED, "")
    assert fates["members"][0] is Fate.NOT_CALLED
    assert "it has no forward; it holds members.0" in fates["members"][1]
    assert fates["skipped"] == (Fate.NOT_CALLED, "never called through __call__ in the traced step")
    for name in ("used", "direct"):
        assert fates[name][0] is Fate.BYPASSED
        assert "its weights are used directly" in fates[name][1]


def test_a_fate_is_that_at_the_steps_end() -> None:
    model = zoo.CallsAnotherMethod()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ml.trace(model) as trace:
        model(rows()).sum().backward()
        optimizer.step()
        captures = trace.captures
        optimizer.zero_grad()
    assert {c.fqn: c.fate for c in trace.coverage}["used"] is Fate.BYPASSED
    assert trace.captures is captures


def test_a_recomputed_run_is_counted_apart_from_calls() -> None:
    for reentrant in (True, False):
        model = zoo.Checkpointed(reentrant)
        with ml.trace(model) as trace:
            model(rows()).sum().backward()
        found = {c.fqn: (c.calls, c.recomputes) for c in trace.coverage}
        assert found["body.0"] == (1, 1)
        assert found["head"] == (1, 0)


def test_only_what_was_asked_for_is_recorded(tmp_path: Path) -> None:
    model = zoo.SharedChild()
    for asked, found in {
        "left": ["left"],
        "Linear": ["left.0"],
        "*.1": ["left.1", "right.1"],
        "": [""],
    }.items():
        with ml.trace(model, modules=asked) as trace:
            model(rows())
        assert [c.fqn for c in trace.captures] == found
        entries = graded(trace, tmp_path / f"repo{len(asked)}")
        assert not any(faults(e.grade) for e in entries.values())


def test_a_pattern_that_matches_nothing_is_an_error_that_says_what_is_close() -> None:
    with pytest.raises(NotFound, match=r"no module matches 'lef\.0'") as caught:
        ml.trace(zoo.SharedChild(), modules=["left", "lef.0"])
    assert caught.value.did_you_mean[0] == "left.0"
    assert "globs" in caught.value.hint


@pytest.mark.parametrize("options", [{"warmup": -1}, {"steps": 0}])
def test_numbers_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 0 and 1"):
        ml.trace(zoo.CalledTwice(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": "some"},
        {"weights": ""},
        {"max_calls": 0},
        {"max_calls": None},
        {"embedding_rows": "few"},
        {"max_bytes": "1GB"},
        {"max_module_bytes": 1.5},
        {"grads": "yes"},
    ],
)
def test_a_wish_that_cannot_be_kept_is_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ml.Keep(**options)  # type: ignore[arg-type]


def test_no_pattern_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to trace"):
        ml.trace(zoo.CalledTwice(), modules=[])


def test_shapes_alone_are_kept_when_asked_for(tmp_path: Path) -> None:
    model = zoo.TiedWeights()
    with ml.trace(model, keep=ml.Keep(tensors="shape", weights="shape")) as trace:
        model(torch.tensor([1, 2, 6]))
    entries = graded(trace, tmp_path / "repo")
    assert {str(e.grade) for e in entries.values()} == {"shape"}
    (ids,), _ = entries[""].inputs()
    assert ids.tolist() == [1, 2, 6]  # small integers keep their values
    first, again = (entries["head"].inputs(seed=3)[0][0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, entries["head"].inputs(seed=4)[0][0])
    rebuilt = entries[""].rebuild()
    assert rebuilt.head.weight is rebuilt.embed.weight


def test_a_model_called_by_several_threads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.CalledTwice().eval()
    batches = [rows() + i for i in range(4)]
    outputs: dict[int, Tensor] = {}
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        with torch.no_grad():
            for _ in range(5):
                outputs[i] = model.layer(batches[i])

    with ml.trace(model, keep=ml.Keep(max_calls=100)) as trace, switching_often():
        with torch.no_grad():
            model(rows())
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]  # type: ignore[func-returns-value]
        [t.join() for t in threads]  # type: ignore[func-returns-value]
    layer = {c.fqn: c for c in trace.captures}["layer"]
    assert len(layer.calls) == 22
    assert len({call.thread for call in layer.calls}) == 5
    entries = graded(trace, tmp_path / "repo")
    assert not any(faults(e.grade) for e in entries.values())


@pytest.mark.parametrize("hooked", [False, True])
def test_saving_and_copying_the_model_within_the_step(hooked: bool) -> None:
    model, _ = model_and_optimizer()
    if hooked:
        model[0].register_forward_pre_hook(zoo.add_one_before)
    clean = copy.deepcopy(model)
    with ml.trace(model, keep=ml.Keep(grads=True)) as trace:
        out = model(rows())
        buffer = io.BytesIO()
        torch.save([model, out.detach()], buffer)
        torch.save(out, io.BytesIO())
        twin = copy.deepcopy(model)
        assert trace._watch is not None
        out.sum().backward()
    assert b"modulelens." not in buffer.getvalue()
    buffer.seek(0)
    loaded, _ = torch.load(buffer, weights_only=False)
    for copied in (twin, loaded):
        copied.load_state_dict(clean.state_dict())
        copied.register_forward_pre_hook(zoo.add_one_before)
        assert torch.equal(copied(rows()), copy.deepcopy(clean)(rows() + 1))
        assert trace.captures[0].module is not copied


def test_two_models_are_traced_at_once(tmp_path: Path) -> None:
    first, second = zoo.CalledTwice().eval(), zoo.CalledTwice().eval()
    with ml.trace(first, name="first") as one, ml.trace(second, name="second") as two:
        second(first(rows()))
    for trace in (one, two):
        assert [len(c.calls) for c in trace.captures] == [1, 2, 1]
        entries = graded(trace, tmp_path / "repo")
        assert not any(faults(e.grade) for e in entries.values())
    assert len(ml.Repo(tmp_path / "repo")) == 6


def test_a_part_of_a_model_is_traced_while_the_whole_is() -> None:
    model = zoo.SharedChild()
    with ml.trace(model) as whole, ml.trace(model.left) as part:
        model(rows())
    assert [c.fqn for c in part.captures] == ["", "0", "1"]
    assert [c.fqn for c in whole.captures] == ["", "left", "left.0", "left.1", "right", "right.1"]
    assert hooks_of(model) == {}


class DistributedModelParallel(nn.Module):
    """The user's own, which only has the name of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


def test_a_model_that_has_a_wrappers_name_is_a_model() -> None:
    model = DistributedModelParallel()
    with ml.trace(model) as trace:
        model(torch.ones(1, 2))
    assert trace.name == "DistributedModelParallel"
    assert [c.fqn for c in trace.captures] == ["", "lin"]
