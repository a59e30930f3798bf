"""A run is repeatable: module state, inputs, random streams and switches start over each time."""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from modulelens.context import RngWatch, read_ambient
from modulelens.errors import UsageError
from modulelens.measure.run import Run
from modulelens.records import Ambient, Autocast


class ThreeStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x) + np.random.randn() + random.gauss(0, 1)


class RemembersEverything(nn.Module):
    """Changes all that a forward can change on its module."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.plain = torch.zeros(3)
        self.calls = 0
        self.log = [1, {"deep": [2]}]
        self.seen = {1}
        self.gone = "here"
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("replaced", torch.ones(2))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        out = self.norm(x) * (self.calls + 1) + self.plain + self.weight
        out = out + torch.rand(3, generator=self.generator) + len(self.log) + self.replaced.sum()
        with torch.no_grad():
            self.weight.add_(1)
        self.plain.add_(1)
        self.calls += 1
        self.log.append(3)
        self.log[1]["deep"].append(4)
        self.seen.add(5)
        self.new = torch.ones(1)
        self.__dict__.pop("gone", None)
        self.replaced = self.replaced + 1
        self.norm.eval()
        self.weight.requires_grad_(False)
        return out


def run_twice(run):
    outputs = []
    for _ in range(2):
        run.fresh()
        outputs.append(run.forward().detach().clone())
    return outputs


def test_all_three_random_streams_start_over():
    run = Run(ThreeStreams(), (torch.ones(50),))
    with run:
        first, second = run_twice(run)
    assert torch.equal(first, second)
    first, third = run_twice(run)
    assert torch.equal(first, second)
    assert torch.equal(second, third)


def test_streams_of_the_process_do_not_move():
    watch = RngWatch()
    before = watch.read()
    run = Run(ThreeStreams(), (torch.ones(5),))
    with run:
        run_twice(run)
    run_twice(run)
    assert watch.read() is before


def test_a_given_stream_is_used():
    torch.manual_seed(5)
    state = RngWatch().read()
    wanted = torch.nn.functional.dropout(torch.ones(50))
    run = Run(nn.Dropout(), (torch.ones(50),), rng=state)
    assert torch.equal(run.forward(), wanted)


@pytest.mark.parametrize("cow", [True, False], ids=["own memory", "numpy's memory"])
def test_module_state_starts_over(cow):
    module = RemembersEverything()
    if not cow:
        module.weight.data = torch.from_numpy(np.ones(3, dtype=np.float32))
    run = Run(module, (torch.randn(4, 3),))
    names = set(vars(module))
    with run:
        first, second = run_twice(run)
        run.fresh()
    assert torch.equal(first, second)
    assert set(vars(module)) == names
    assert module.calls == 0
    assert module.log == [1, {"deep": [2]}]
    assert module.seen == {1}
    assert module.norm.training
    assert module.norm.num_batches_tracked.item() == 0
    assert module.weight.requires_grad
    assert module.weight.tolist() == [1, 1, 1]
    assert module.replaced.tolist() == [1, 1]


class Plain:
    def __init__(self):
        self.calls = 0


class HasManyObjects(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Plain()
        self.namespace = types.SimpleNamespace(calls=0)
        self.lock = threading.Lock()
        self.logger = logging.getLogger("modulelens.test")
        self.compiled = torch.compile(lambda x: x, backend="eager")

    def forward(self, x):
        self.own.calls += 1
        self.namespace.calls += 1
        self.logger.seen = True
        return x + self.own.calls + self.namespace.calls


def test_plain_objects_start_over_and_pythons_own_are_left_alone():
    module = HasManyObjects()
    run = Run(module, (torch.ones(1),))
    assert torch.equal(*run_twice(run))
    assert module.own.calls == 1
    assert module.logger.seen
    del module.logger.seen


def test_hooks_of_the_forward_do_not_pile_up():
    class Hooks(nn.Module):
        def forward(self, x):
            self.register_forward_hook(lambda m, a, out: out + 1)
            return x

    module = Hooks()
    run = Run(module, (torch.ones(1),))
    assert torch.equal(*run_twice(run))
    run.fresh()
    assert not module._forward_hooks


class ChangesItsWeight(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        with torch.no_grad():
            self.weight.mul_(2)
        return out


def test_casts_of_the_last_runs_weights_are_not_used_again():
    run = Run(ChangesItsWeight(4, 4), (torch.randn(2, 4),), context=CONTEXTS["autocast"])
    with run:
        first, second = run_twice(run)
    assert first.dtype is torch.bfloat16
    assert torch.equal(first, second)


class WritesBehindTorchsBack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.a, self.b = torch.zeros(4), torch.zeros(4)

    def forward(self, x):
        self.weight.detach().numpy()[0] += 1
        ctypes.c_float.from_address(self.a.data_ptr()).value += 1
        torch.from_dlpack(self.b)[1] += 5
        return x + self.weight + self.a + self.b


def test_writes_through_foreign_pointers_are_undone():
    run = Run(WritesBehindTorchsBack(), (torch.zeros(4),))
    first, second = run_twice(run)
    assert first.tolist() == second.tolist() == [3, 6, 1, 1]


def test_objects_keep_their_identity_and_ties_stay():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    before = {name: id(t) for name, t in module.state_dict(keep_vars=True).items()}
    run = Run(module, (torch.ones(1, 2),))
    with torch.no_grad():
        module[0].weight.mul_(3)
        module[1].bias.data = torch.zeros(2)
    run.fresh()
    assert {name: id(t) for name, t in module.state_dict(keep_vars=True).items()} == before
    assert module[1].weight is module[0].weight


def test_inputs_changed_in_place_do_not_leak():
    x = torch.ones(3)
    run = Run(lambda x: x.mul_(2), (x,))
    first, second = run_twice(run)
    assert torch.equal(first, second)
    assert x.tolist() == [1, 1, 1]
    assert run.inputs[0][0].tolist() == [2, 2, 2]


class ViewsOfOneBuffer(nn.Module):
    def forward(self, whole, left, *, again):
        left.add_(1)
        return whole + again["same"]


def test_aliases_strides_and_identity_between_arguments_are_kept():
    whole = torch.arange(12.0).reshape(3, 4).t()
    run = Run(ViewsOfOneBuffer(), (whole, whole[:1]), {"again": {"same": whole}})
    (a, b), kwargs = run.inputs
    assert kwargs["again"]["same"] is a
    assert b.untyped_storage()._cdata == a.untyped_storage()._cdata
    assert a.untyped_storage()._cdata != whole.untyped_storage()._cdata
    assert a.stride() == whole.stride()
    out = run.forward()
    assert out[0].tolist() == ((whole[0] + 1) * 2).tolist()


def test_leaf_and_non_leaf_inputs_keep_their_kind_and_get_gradients():
    leaf = torch.ones(2, requires_grad=True)
    non_leaf = torch.ones(2, requires_grad=True) * 2
    frozen = torch.ones(2)
    run = Run(lambda a, b, c: (a * b.mul_(1) * c).sum(), (leaf, non_leaf, frozen))
    run.backward(run.forward())
    a, b, c = run.inputs[0]
    assert (a.is_leaf, b.is_leaf, c.requires_grad) == (True, False, False)
    gradients = run.gradients()[1]
    assert set(gradients) == {"args[0]", "args[1]"}
    assert gradients["args[1]"].tolist() == [1, 1]
    assert leaf.grad is None


def test_an_argument_of_the_module_itself_stays_it():
    module = nn.Linear(2, 2)
    run = Run(module.forward, (torch.ones(1, 2),))
    shares = Run(lambda w, v: None, (module.weight, module.weight.detach()[0]))
    assert run.owner is module
    assert shares.inputs[0][0] is not module.weight
    run = Run(module, (module.weight, module.weight.detach()[0]))
    weight, row = run.inputs[0]
    assert weight is module.weight
    assert row.untyped_storage()._cdata == module.weight.untyped_storage()._cdata


def test_gradients_are_cleared_and_repeatable():
    run = Run(nn.Linear(3, 3), (torch.randn(2, 3),))
    got = []
    for _ in range(2):
        run.fresh()
        run.backward(run.forward())
        got.append(run.gradients()[0]["weight"].clone())
    assert torch.equal(*got)


class LossAndLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        logits = self.head(x)
        return {"loss": logits.square().mean(), "logits": logits}


def test_dependent_outputs_do_not_count_twice():
    module = LossAndLogits()
    x = torch.randn(5, 4)
    totals = {}
    out = module(x)
    for name, tensor in out.items():
        tensor.register_hook(lambda g, name=name: totals.__setitem__(name, g.clone()))
    (out["loss"] + out["logits"].sum()).backward()
    wanted = module.head.weight.grad.clone()
    run = Run(module, (x,), grad_output=[totals["loss"], totals["logits"]])
    run.fresh()
    run.backward(run.forward())
    assert torch.equal(run.gradients()[0]["head.weight"], wanted)


def test_a_wrong_number_of_gradients_is_named():
    run = Run(LossAndLogits(), (torch.randn(2, 4),), grad_output=[torch.ones(())])
    with pytest.raises(UsageError, match="1 gradients, the output has 2"):
        run.backward(run.forward())


CONTEXTS = {
    "autocast": Ambient(autocast=(Autocast(device="cpu", dtype="bfloat16"),)),
    "no_grad": Ambient(grad_enabled=False),
    "inference": Ambient(grad_enabled=False, inference_mode=True),
    "float64": Ambient(default_dtype="float64"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_context_holds_inside_and_is_gone_after(name):
    inside = []
    before = read_ambient()
    module = nn.Linear(2, 2)
    hook = module.register_forward_pre_hook(lambda *_: inside.append(read_ambient()))
    run = Run(module, (torch.ones(1, 2, requires_grad=True),), context=CONTEXTS[name])
    with run:
        run.fresh()
        out = run.forward()
        run.backward(out)
    run.forward()
    hook.remove()
    assert read_ambient() == before
    wanted = CONTEXTS[name]
    for seen in inside:
        for field in ("autocast", "grad_enabled", "inference_mode", "default_dtype"):
            assert getattr(seen, field) == getattr(wanted, field)
    assert out.dtype is (torch.bfloat16 if name == "autocast" else torch.float32)
    assert out.requires_grad is (name not in ("no_grad", "inference"))


def test_autocast_is_off_in_backward():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    run = Run(Watch.apply, (torch.ones(2, requires_grad=True),), context=CONTEXTS["autocast"])
    run.backward(run.forward())
    assert seen == [False]


def test_an_error_restores_everything():
    def fails(_):
        torch.set_default_dtype(torch.float64)
        torch.rand(1)
        raise ZeroDivisionError

    watch, before = RngWatch(), read_ambient()
    state = watch.read()
    run = Run(fails, (torch.ones(1),), context=before)
    with pytest.raises(ZeroDivisionError):
        run.forward()
    assert read_ambient() == before
    assert watch.read() is state


def test_an_argument_that_cannot_be_copied_is_named():
    run = Run(lambda it: list(it), ((i for i in range(3)),))
    with pytest.raises(UsageError, match="generator"):
        run.forward()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_special_tensors_are_copied():
    sparse = torch.eye(3).to_sparse()
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    conj = torch.ones(2, dtype=torch.complex64).mul(1j).conj()
    float8 = torch.ones(3).to(torch.float8_e4m3fn)
    run = Run(lambda *t: t, (sparse, quantised, conj, float8, torch.empty(0, 3)))
    made = run.forward()
    assert torch.equal(made[0].to_dense(), torch.eye(3))
    assert torch.equal(made[1].dequantize(), quantised.dequantize())
    assert made[2].is_conj()
    assert made[2].tolist() == conj.tolist()
    assert made[3].dtype is torch.float8_e4m3fn
    assert made[4].shape == (0, 3)
