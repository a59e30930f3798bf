"""Work that happens in other methods than forward is recorded where they are named."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loop import Case, add_unverified, build, faults, graded, rows, run, same, verify
from torch import Tensor, nn

import modulelens as ml
from modulelens.errors import NotFound, UsageError
from modulelens.records import Fate, Status
from modulelens.report.entry import entry_page
from modulelens.report.entry_view import entry_view


class Coder(nn.Module):
    """Has no forward; one method uses a child's weights, the other one calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 2), nn.Linear(2, 4)
        self.drop = nn.Dropout(0.5)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.drop(F.linear(x, self.enc.weight, self.enc.bias)) * scale

    def decode(self, z: Tensor) -> Tensor:
        return self.dec(z)

    def _hidden(self) -> None: ...


class UsesCoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()

    def forward(self, x: Tensor) -> Tensor:
        return self.coder.decode(self.coder.encode(x, scale=2.0))


class Deeper(Coder):
    """Goes on to the method of its base; its forward calls it, and it calls its forward."""

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().encode(x, scale=scale) + self(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(x[:, :2])[:, :2]


class Twin(nn.Module):
    """Two modules, one of which extends the class of the other; and the model's own method."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.deeper = Coder(), Deeper()

    def forward(self, x: Tensor) -> Tensor:
        return self.plain.decode(self.plain.encode(x)) + self.deeper.decode(self.deeper.encode(x))

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) + self(x)).square().mean()


def calls_of(entry: ml.Entry) -> list[str]:
    return [call.method for call in entry.metadata.calls]


def test_without_names_coverage_says_what_could_be_named() -> None:
    with ml.trace(UsesCoder()) as trace:
        trace.model(rows()).sum().backward()
    coder, enc = trace.coverage["coder"], trace.coverage["coder.enc"]
    assert coder.fate is Fate.NOT_CALLED
    assert "it has no forward" in coder.reason
    assert "methods=['decode', 'encode']" in coder.reason
    assert enc.fate is Fate.BYPASSED
    assert "methods=" not in enc.reason


def test_named_methods_are_recorded_and_replayed(tmp_path: Path) -> None:
    plain = run(CASE, build(CASE))
    model = build(CASE)
    trace = ml.trace(model, methods=["encode", "decode"], keep=ml.Keep(grads=True))
    assert same(run(CASE, model, trace).gradients, plain.gradients)
    assert trace.coverage["coder"].calls == 2
    entries = {e.fqn: e for e in add_unverified(trace, tmp_path / "repo")}
    verify(tmp_path / "repo", entries.values())
    assert {e.fqn: faults(e.grade) for e in entries.values()} == dict.fromkeys(entries, "")
    coder = entries["coder"]
    assert calls_of(coder) == ["encode", "decode"]
    assert coder.grade is not None
    assert coder.grade.param_grads == "exact"
    args, kwargs = coder.inputs(0)
    assert same(list(args), [rows()])
    assert kwargs == {"scale": 2.0}
    assert coder.check(backward=True).status is Status.EXACT
    assert coder.check(Coder, backward=True).status is Status.EXACT
    assert coder.check(lambda module, *a, **k: module.decode(*a, **k), call=1)
    assert not coder.check(lambda module, z: module.decode(z) * 2, call=1)
    assert coder.benchmark(budget_s=0.1, call=1).median_s > 0
    assert coder.profile(budget_s=0.1).params == sum(p.numel() for p in model.parameters())
    with pytest.raises(NotFound, match="Linear has no method 'encode'"):
        coder.check(nn.Linear(4, 2), call=0)


CASE = Case(UsesCoder)


def test_inherited_and_nested_calls_count_once(tmp_path: Path) -> None:
    case = Case(Twin, lambda m: m.loss(rows()))
    plain = run(case, build(case))
    model = build(case)
    trace = ml.trace(model, methods=["encode", "decode", "loss"], keep=ml.Keep(grads=True))
    left = run(case, model, trace)
    assert same(left.gradients, plain.gradients)
    assert same(left.streams, plain.streams)
    assert len(trace.watches) == 1
    entries = graded(trace, tmp_path)
    assert {e.fqn: faults(e.grade) for e in entries.values()} == dict.fromkeys(entries, "")
    assert calls_of(entries[""]) == ["forward", "forward", "loss"]
    assert [call.nested for call in entries[""].metadata.calls] == [True, True, False]
    assert calls_of(entries["plain"]) == ["encode", "decode"] * 2
    assert calls_of(entries["deeper"]) == ["decode", "forward", "encode", "decode"] * 2
    nested = [call.nested for call in entries["deeper"].metadata.calls]
    assert nested == [True, True, False, False] * 2


def test_a_step_is_a_call_of_a_method_of_the_model() -> None:
    model = Twin()
    with ml.trace(model, methods=["loss"], warmup=1, steps=2) as trace:
        for _ in range(4):
            model.loss(rows()).backward()
    assert trace.done
    assert trace.first_step == 1
    assert [call.step for call in trace.captures[0].calls if call.method == "loss"] == [0, 1]


def test_classes_are_as_they_were_when_traces_end_in_any_order() -> None:
    before = {cls: dict(vars(cls)) for cls in (Coder, Deeper, Twin, nn.Linear)}
    one, two, other = Twin(), Twin(), Twin()
    first = ml.trace(one, methods=["encode"]).__enter__()
    second = ml.trace(two, methods=["encode"]).__enter__()
    two(one(rows()))
    first.__exit__(None, None, None)
    other(two.plain.decode(two.plain.encode(rows())))
    second.__exit__(None, None, None)
    assert {cls: dict(vars(cls)) for cls in before} == before
    for trace in (first, second):
        assert {c.fqn: len(c.calls) for c in trace.captures}["plain"] == 1 + (trace is second)


def test_what_the_user_saves_within_the_step_holds_nothing_of_it() -> None:
    model = UsesCoder()
    with ml.trace(model, methods=["encode"]):
        model(rows())
        twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for copied in (twin, loaded):
        assert vars(copied.coder).keys() == vars(Coder()).keys()
        assert same(copied.eval()(rows()).detach(), model.eval()(rows()).detach())


def test_a_method_that_raises_leaves_the_others_paired(tmp_path: Path) -> None:
    class Fails(Coder):
        def encode(self, x: Tensor, **_: Any) -> Tensor:
            if x.sum() > 100:
                raise ValueError("too large")
            return super().encode(x)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.encode(x + 100)
            except ValueError:
                return self.encode(x)

    with ml.trace(Fails(), methods=["encode"]) as trace:
        trace.model(rows())
    calls = {call.method: call for call in trace.captures[0].calls}
    assert trace.coverage[""].calls == 2
    assert calls["forward"].args == calls["encode"].args


def test_threads_that_call_the_model_at_once_are_one_step() -> None:
    model, barrier = Twin().eval(), threading.Barrier(2)

    def work() -> None:
        barrier.wait()
        with torch.no_grad():
            model.loss(rows())

    with ml.trace(model, methods=["loss"], keep=ml.Keep(max_calls=64)) as trace:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls = trace.captures[0].calls
    assert len(trace.watches) in (1, 2)  # the second thread may start when the first is done
    assert {c.method for c in calls} == {"forward", "loss"}


@pytest.mark.parametrize(
    ("names", "error", "hint"),
    [
        (["encod"], NotFound, "decode, encode"),
        (["train"], UsageError, "your own classes"),
        ("encode", UsageError, "methods=['encode']"),
        (["_hidden"], NotFound, "encode"),
        ([""], NotFound, "encode"),
    ],
)
def test_a_name_that_is_no_entry_point_is_refused(names: Any, error: Any, hint: str) -> None:
    with pytest.raises(error) as caught:
        ml.trace(UsesCoder(), methods=names)
    assert hint in caught.value.hint


def test_what_is_shown_names_the_method_and_what_is_not_compared(tmp_path: Path) -> None:
    with ml.trace(UsesCoder(), methods=["encode"]) as trace:
        trace.model(rows())
    entry = graded(trace, tmp_path)["coder"]
    assert "call 0: encode(float32[3,4], scale=2.0) -> float32[3,2]" in entry_page(
        entry_view(entry.metadata)
    )

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stream, self.count = torch.Generator(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + torch.rand(4, generator=self.stream)

    with ml.trace(Draws()) as trace:
        trace.model(rows())
    (drawing,) = add_unverified(trace, tmp_path / "repo")
    (call,) = drawing.metadata.calls
    assert call.attributes_after == {"count": 1}
    assert call.notes == ("the call changed stream, which is not compared",)
    assert call.notes[0] in entry_page(entry_view(drawing.metadata))


class Indirect(nn.Module):
    """Calls its coder through what it kept of it when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()
        self.coder.kept = self.coder.encode
        self.way = self.coder.encode

    def forward(self, x: Tensor) -> Tensor:
        return self.coder.decode(self.coder.kept(x) + self.way(x))


class Shadowed(UsesCoder):
    def __init__(self) -> None:
        super().__init__()
        self.coder.encode = torch.compile(self.coder.encode, backend="eager")


@pytest.mark.parametrize("make", [Indirect, Shadowed])
def test_a_named_method_that_is_not_heard_is_told(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    with ml.trace(model, methods=["encode", "decode"]) as trace:
        model(rows()).sum().backward()
    (told,) = (text for text in trace.warnings if "'encode'" in text)
    assert "coder" in told
    assert ("stands in for it" in told) == (make is Shadowed)
    entries = {e.fqn: e for e in ml.Repo(tmp_path / "repo").add(trace)}
    assert calls_of(entries["coder"]) == ["decode"]
    assert {e.grade.level.value for e in entries.values()} == {"exact"}
    kept = vars(entries[""].rebuild().coder)["kept" if make is Indirect else "encode"]
    assert type(kept.__self__) is Coder


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = UsesCoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) - self.one(x * 2)


def test_a_backward_over_several_steps_is_told() -> None:
    model = UsesCoder()
    with ml.trace(model, keep=ml.Keep(grads=True), steps=2) as trace:
        (model(rows()) - model(rows() * 2)).square().sum().backward()
    (told,) = (text for text in trace.warnings if "no gradient arrived" in text)
    assert "step 0" in told
    assert "trace a module that makes them" in told
    whole = Siamese()
    with ml.trace(whole, keep=ml.Keep(grads=True)) as trace:
        whole(rows()).square().sum().backward()
    assert not [text for text in trace.warnings if "gradient" in text]
    assert all(call.grad_output for call in trace.captures[0].calls)
