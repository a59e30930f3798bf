"""Errors of the user's own pass through a trace unchanged, and nothing is left behind."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, faults, graded, hooks_of, rows
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import modulelens as ml
from modulelens.errors import Conflict
from modulelens.records import Fate


class Mine(Exception):
    """An error of the user's."""


def installed() -> tuple[object, ...]:
    """What a trace patches outside the model."""
    return (
        torch.ctc_loss,
        nn.Module.__call__,
        dict(torch_module._global_forward_pre_hooks),
        dict(torch_module._global_forward_hooks),
        bool(torch_module._has_any_global_hook()),
        list(warnings.filters),
        eval_frame._stance,
        dict(torch_optimizer._global_optimizer_post_hooks),
    )


@pytest.mark.parametrize(
    "error", [Mine("mine"), KeyboardInterrupt(), SystemExit(3), StopIteration()]
)
def test_an_exception_inside_the_forward_is_the_users_own(
    error: BaseException, tmp_path: Path
) -> None:
    earlier = zoo.CalledTwice()
    with ml.trace(earlier, name="earlier") as first:
        earlier(rows())
    entries = add_unverified(first, tmp_path / "repo")

    model, before = zoo.Raises(error), installed()
    plain = hooks_of(model)
    with pytest.raises(type(error)) as caught, ml.trace(model) as trace:
        model(rows())
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert caught.traceback[-1].path == Path(zoo.__file__)
    assert hooks_of(model) == plain
    assert installed() == before
    assert not trace.captures
    assert trace.warnings == [f"step aborted: {type(error).__name__}; nothing of it is kept"]

    model.error = None
    with ml.trace(model) as again:
        model(rows())
    assert [c.fqn for c in again.captures] == ["", "layer"]
    assert earlier.layer in [e.module for e in first.captures]
    assert torch.equal(entries[0].rebuild().layer.weight, earlier.layer.weight)


def test_a_step_that_failed_and_was_caught_does_not_count() -> None:
    model = zoo.Raises(Mine("first batch"))
    with ml.trace(model) as trace:
        for _ in range(2):
            try:
                model(rows())
            except Mine:
                model.error = None
    assert trace.done
    assert [len(c.calls) for c in trace.captures] == [1, 1]
    assert trace.warnings == ["step aborted: Mine; nothing of it is kept"]


def test_an_exception_after_the_forward_leaves_the_step_whole(tmp_path: Path) -> None:
    model = zoo.CalledTwice()
    with pytest.raises(Mine), ml.trace(model) as trace:
        model(rows())
        raise Mine
    assert [c.fqn for c in trace.captures] == ["", "layer", "drop"]
    assert trace.warnings == ["step ended by Mine"]
    assert not any(faults(e.grade) for e in graded(trace, tmp_path / "repo").values())


def test_an_exception_inside_a_child_that_its_parent_catches(tmp_path: Path) -> None:
    model = zoo.CatchesInside()
    with ml.trace(model) as trace:
        model(rows())
    fates = {c.fqn: c for c in trace.coverage}
    assert fates["fails"].fate is Fate.REFUSED
    assert "did not return" in fates["fails"].reason
    assert fates["layer"].fate is fates[""].fate is Fate.RECORDED


def test_an_exception_in_the_backward_is_the_users_own() -> None:
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            raise Mine("backward")

    model, before = zoo.CalledTwice(), installed()
    with pytest.raises(Mine, match="backward"), ml.trace(model, keep=ml.Keep(grads=True)) as trace:
        Explodes.apply(model(rows())).sum().backward()
    assert installed() == before
    assert hooks_of(model) == {}
    assert len(trace.captures) == 3
    assert all(not p._backward_hooks for p in model.parameters())


def test_one_model_is_traced_once_at_a_time() -> None:
    model = zoo.CalledTwice()
    with ml.trace(model) as outer:
        since = r"being traced already \(since .*test_interrupted"
        with pytest.raises(Conflict, match=since) as e, ml.trace(model):
            raise AssertionError("not reached")
        assert e.value.code == "CONFLICT"
        assert "leave that" in e.value.hint
        model(rows())
    assert len(outer.captures) == 3
    assert hooks_of(model) == {}
    with ml.trace(model) as again:
        model(rows())
    assert len(again.captures) == 3


def test_a_value_that_cannot_be_read_spoils_its_module_only() -> None:
    class Hostile:
        @property
        def __class__(self) -> type:
            raise Mine("probed")

    model = zoo.SharedChild()
    vars(model.left[1])["odd"] = Hostile()
    with ml.trace(model) as trace:
        out = model(rows())
    assert torch.equal(out, model(rows()))
    assert {c.fqn for c in trace.captures} >= {"", "left.0", "right", "right.1"}


def test_memory_of_a_finished_trace_is_free_to_go() -> None:
    import gc
    import weakref

    model = zoo.CalledTwice()
    with ml.trace(model) as trace:
        out = model(rows())
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None
    gone_model = weakref.ref(model)
    del model, trace
    gc.collect()
    assert gone_model() is None
    assert sys.getrefcount(nn.Module.__call__) > 0


def test_two_traces_that_end_in_any_order_leave_nothing() -> None:
    models, before = (zoo.CtcTrained(False), zoo.CtcTrained(True)), installed()
    for order in ((0, 1), (1, 0)):
        traces = [ml.trace(model) for model in models]
        for trace in traces:
            trace.__enter__()
        models[1](models[0](rows()).detach().sum() * rows())
        for place in order:
            traces[place].__exit__(None, None, None)
        assert installed() == before
        assert all(trace.captures for trace in traces)
