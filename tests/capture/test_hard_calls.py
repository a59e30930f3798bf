"""What a record says of calls that are easily recorded wrong, and what replaying them gives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, faults, graded, hooks_of, rows, same, streams, verify
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modulelens as ml
from modulelens.records import Fate, Status

GRADS = ml.Keep(grads=True)


def entries_of(model: nn.Module, repo: Path, **options: Any) -> dict[str, ml.Entry]:
    """A traced step with backward; its entries by fqn, graded in this process."""
    with ml.trace(model, keep=GRADS, **options) as trace:
        output = model(rows())
        tensors = output.values() if isinstance(output, dict) else [output]
        sum(t.sum() for t in tensors).backward()
    return graded(trace, repo)


def test_an_input_that_the_call_overwrote_is_kept_as_it_was_and_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)  # of some weights nothing is below zero
    entry = entries_of(zoo.InplaceOnInput(), tmp_path)["act"]
    (call,) = entry.metadata.calls
    (before,), _ = entry.inputs()
    assert call.mutated == ("args[0]",)
    assert before.min() < 0
    (after,) = entry._replay().value(call.args_after)
    assert same(after.detach(), before.detach().relu())
    assert faults(entry.grade) == ""


def test_every_leaf_of_an_output_has_its_gradient(tmp_path: Path) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.layer(x)
            pair = zoo.Pair(y.sum(), None)
            return {"list": [y, 3], "batch": zoo.Batch(y * 2), "pair": pair, "still": y.detach()}

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = Parts()

        def forward(self, x: Tensor) -> Tensor:
            out = self.parts(x)
            return out["list"][0] * 3 + out["batch"].x * 5 + out["pair"].left * 7 + out["still"]

    grads = entries_of(Uses(), tmp_path)["parts"].grads()["outputs"]
    sizes = {place: grad.flatten()[0].item() for place, grad in grads.items()}
    # Totals: what reaches `y` comes from all that was made of it.
    assert sizes == {"0": 3 + 2 * 5 + 12 * 7, "1": 5.0, "2": 12 * 7}


def test_the_type_of_an_output_comes_back(tmp_path: Path) -> None:
    entry = entries_of(zoo.DataclassIO(), tmp_path)[""]
    output = entry.outputs()
    assert type(output) is zoo.Result
    assert output.loss is output["loss"]
    assert list(output) == ["loss", "logits"]


def test_a_first_layer_has_no_input_gradient_and_its_weights_are_compared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    with ml.trace(model, keep=GRADS) as trace:
        model(torch.tensor([1, 2])).sum().backward()
    entry = graded(trace, tmp_path)["0"]
    assert entry.grads()["inputs"] == {}
    assert entry.grade is not None
    assert (entry.grade.param_grads, entry.grade.input_grads) == ("exact", None)
    assert entry.check(backward=True).status is Status.EXACT


def test_gradients_of_a_step_are_its_own_not_those_left_from_before(tmp_path: Path) -> None:
    model = zoo.CalledTwice().eval()
    model(rows()).square().sum().backward()
    left = {name: p.grad.clone() for name, p in model.named_parameters()}
    with ml.trace(model, keep=GRADS) as trace:
        (model(rows()).sum() * 2).backward()
    entry = graded(trace, tmp_path)["layer"]
    assert len(entry.metadata.calls) == 2
    for name, grad in entry.grads()["parameters"].items():
        parameter = model.layer.get_parameter(name)
        assert torch.allclose(parameter.grad - left[f"layer.{name}"], grad, atol=1e-5)
    assert faults(entry.grade) == ""


def test_modes_and_frozen_weights_are_those_of_each_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), zoo.CalledTwice())
    model[1].eval()
    model[2].drop.eval()
    model[0].weight.requires_grad_(False)
    rebuilt = entries_of(model, tmp_path)[""].rebuild()
    assert [m.training for m in rebuilt.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in rebuilt.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


class CheckpointedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), zoo.PythonCounter())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, determinism_check="none")


def test_a_recomputed_run_does_not_replace_the_first(tmp_path: Path) -> None:
    model = CheckpointedNorm()
    entries = entries_of(model, tmp_path)
    norm = entries["block.1"]
    assert model.block[1].num_batches_tracked == 2
    assert (len(norm.metadata.calls), norm.metadata.recomputes) == (1, 1)
    assert norm.rebuild().num_batches_tracked == 0
    assert {e.fqn: e.grade.buffers for e in entries.values() if e.grade}["block.1"] == "exact"


def test_one_tensor_in_several_places_is_one_again(tmp_path: Path) -> None:
    model = zoo.SameTensorThrice()
    with ml.trace(model) as trace:
        model(rows(6, 8).reshape(2, 3, 8))
    (q, k, v), _ = graded(trace, tmp_path)["attention"].inputs()
    assert q is k is v


class TakesWeight(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class GivesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = TakesWeight(self.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.table(torch.tensor([1])).sum()


@pytest.mark.parametrize("strategy", ["init", "structure"])
def test_a_weight_given_to_a_constructor_is_shared_again(strategy: str, tmp_path: Path) -> None:
    with ml.track_init():
        model = GivesWeight()
    entries = entries_of(model, tmp_path)
    assert {e.fqn: faults(e.grade) for e in entries.values()} == dict.fromkeys(entries, "")
    rebuilt = entries[""].rebuild(strategy=strategy)
    assert rebuilt.table.weight is rebuilt.head.head.weight
    assert same(rebuilt.table.weight.detach(), model.table.weight.detach())


@pytest.mark.parametrize("strategy", ["init", "structure"])
def test_what_was_changed_after_the_constructor_stays_changed(
    strategy: str, tmp_path: Path
) -> None:
    with ml.track_init():
        model = zoo.CalledTwice()
        model.drop.p = 0.0
        model.layer = nn.Linear(4, 4, bias=False)
        model.drop.extra = [1]  # type: ignore[assignment]
    entries = entries_of(model, tmp_path)
    rebuilt = entries[""].rebuild(strategy=strategy)
    assert (rebuilt.drop.p, rebuilt.layer.bias, rebuilt.drop.extra) == (0.0, None, [1])
    assert entries["drop"].rebuild(strategy=strategy).p == 0.0


class Yields(nn.Module):
    """Its forward is a generator: the children are called while somebody takes the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), zoo.CalledTwice()

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.first(x)
        yield self.second(x)


class Awaits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = zoo.CalledTwice()

    async def forward(self, x: Tensor) -> AsyncIterator[Tensor]:
        await asyncio.sleep(0)
        return self.layer(x)  # type: ignore[return-value]


class TakesTurns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.later = Yields(), Yields(), Awaits()

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        total = next(left) + next(right) + next(right)
        left.close()

        async def both() -> list[Tensor]:
            return await asyncio.gather(self.later(x), self.later(x + 1))

        return total + sum(asyncio.run(both()))


def test_calls_that_are_not_nested_as_they_begin_are_paired_all_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TakesTurns()
    with ml.trace(model) as trace:
        model(rows())
    entries = add_unverified(trace, tmp_path / "repo")
    verify(tmp_path / "repo", entries)
    wrong = {e.fqn: faults(e.grade) for e in entries if faults(e.grade)}
    assert wrong.keys() == {"left", "right", "later"}  # what they return is no value
    assert all("opaque_output" in text for text in wrong.values())
    calls = {e.fqn: len(e.metadata.calls) for e in entries}
    assert (calls["left.first"], calls["right.second"], calls["later.layer"]) == (1, 1, 2)
    assert trace.coverage["left.second"].fate is Fate.NOT_CALLED


def test_nothing_that_the_tool_does_moves_the_random_streams(tmp_path: Path) -> None:
    model = nn.Sequential(zoo.DrawsTwice(), nn.Dropout(0.5))
    keep = ml.Keep(tensors="shape", grads=True)
    with ml.trace(model, keep=GRADS) as trace, ml.trace(zoo.CalledTwice(), keep=keep) as shapes:
        model(rows()).sum().backward()
        shapes.model(rows()).sum().backward()
    before = streams()
    entry, shape = (ml.Repo(tmp_path).add(t, verify=True)[0] for t in (trace, shapes))
    entry.rebuild(strategy="structure")
    entry.run()
    shape.inputs(seed=3)
    entry.check(backward=True)
    entry.check(lambda module, *args: module(*args) * 2)
    entry.benchmark(budget_s=0.05)
    entry.profile(budget_s=0.05)
    entry.export(tmp_path / "one.pt")
    assert streams() == before


def test_a_module_that_cannot_be_watched_costs_the_step_only(tmp_path: Path) -> None:
    model = zoo.SharedChild()
    plain = hooks_of(model)
    del model.right.__dict__["_forward_pre_hooks_with_kwargs"]
    model.right.forward = lambda x: x  # torch itself cannot call it any more
    with (
        contextlib.suppress(AttributeError),
        pytest.warns(UserWarning, match="no step of SharedChild was traced"),
        ml.trace(model) as trace,
    ):
        model.left(rows())
        with contextlib.suppress(AttributeError):
            model(rows())
    assert not trace.captures
    assert any("AttributeError" in text for text in trace.warnings)
    assert hooks_of(model) == plain
