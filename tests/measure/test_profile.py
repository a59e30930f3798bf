"""Bytes against counts made by hand, and a profile that leaves its module alone."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modulelens.errors import UsageError
from modulelens.measure.memory import saved_activations
from modulelens.measure.profile import profile
from modulelens.measure.run import Run
from modulelens.records import Ambient


def saved(module, *args, **how):
    run = Run(module, args, **how)
    with run:
        return saved_activations(run)[0]


class CalledOften(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = self.layer(x)
        return x


def test_a_layer_called_often_saves_each_of_its_inputs():
    # The first input is the module's own; the other 99 are activations.
    assert saved(CalledOften(100), torch.randn(4, 8, requires_grad=True)) == 99 * 4 * 8 * 4


class InPlaceAndViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x).relu_()
        return y.view(-1) * y.view(-1)[0], y.t()


def test_views_parameters_and_inputs_are_no_new_memory():
    assert saved(InPlaceAndViews(), torch.randn(4, 8, requires_grad=True)) == 4 * 8 * 4


def test_inputs_and_frozen_layers_save_nothing():
    assert saved(nn.Linear(8, 8), torch.randn(4, 8)) == 0
    assert (
        saved(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(False), torch.randn(4, 8))
        == 0
    )
    assert saved(CalledOften(3), torch.randn(4, 8), context=Ambient(grad_enabled=False)) == 0


def test_what_a_discarded_graph_saved_is_not_counted():
    def forward(x):
        (x.exp() * 2).sum()
        return x.exp()

    assert saved(forward, torch.ones(100, requires_grad=True)) == 400


class Alive(TorchDispatchMode):
    """The truth: every storage that an operator made, and whether it still lives."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[id(storage), storage._cdata] = weakref.ref(storage), storage.nbytes()
        return out

    def bytes(self, without):
        known = {tensor.untyped_storage()._cdata for tensor in without}
        alive = {r()._cdata: n for r, n in self.made.values() if r() is not None}
        return sum(n for key, n in alive.items() if key not in known)


class TransformerStack(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(32, 50)
        self.checkpointed = checkpointed

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_saved_bytes_are_the_storages_alive_after_the_forward(checkpointed):
    module = TransformerStack(checkpointed)
    ids = torch.randint(50, (2, 9))
    with Alive() as truth:
        output = module(ids)
    gc.collect()
    wanted = truth.bytes([*module.parameters(), ids, output])
    found = saved(module, ids)
    # A checkpoint also keeps the random streams of its start: bytes, but no activations.
    assert found <= wanted <= found + (3 * 5056 + 64 if checkpointed else 0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.down.weight = nn.Parameter(self.down.weight.detach())
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.down(self.up(self.norm(x)).relu()))


def test_a_profile_is_complete_and_leaves_the_module_alone(tmp_path):
    module = Block()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    x = torch.randn(32, 16)
    stream = torch.get_rng_state()
    trace = tmp_path / "trace.json"
    found = profile(Run(module, (x,)), trace_file=str(trace), budget_s=0.3)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert found.forward_s > 0
    assert found.backward_s > 0
    product = 2 * 32 * 16 * 64
    assert (found.flops_forward, found.flops_backward) == (2 * product, 4 * product)
    assert found.flops_complete
    assert found.params == 16 * 64 + 64 + 64 * 16 + 32
    assert found.param_bytes == 4 * found.params
    assert found.buffer_bytes == 2 * 16 * 4 + 8
    assert found.input_bytes == found.output_bytes == 32 * 16 * 4
    assert found.peak_bytes >= found.saved_bytes > 0
    names = {(row.name, row.backward): row for row in found.ops}
    assert names["aten::addmm", False].flops == product
    assert names["aten::mm", True].flops == 4 * product
    assert ("aten::native_batch_norm_backward", True) in names
    assert json.loads(trace.read_text())["traceEvents"]


@torch.library.custom_op("lens_test::doubled", mutates_args=())
def doubled(a: torch.Tensor) -> torch.Tensor:
    return a * 2


def test_an_operator_of_another_library_is_unknown_in_its_row_too():
    found = profile(Run(lambda x: doubled(x), (torch.ones(3),)), budget_s=0.05)
    assert found.flops_unknown == {"lens_test::doubled": 1}
    assert not found.flops_complete
    assert {row.flops for row in found.ops if row.name == "lens_test::doubled"} == {None}


def test_peak_holds_what_is_alive_at_once():
    def forward(x):
        for _ in range(5):
            x = (x + 1).clone()
        return x

    found = profile(Run(forward, (torch.ones(250_000),)), budget_s=0.1)
    assert 2_000_000 <= found.peak_bytes <= 3_100_000


def test_no_backward_is_said():
    found = profile(Run(nn.Linear(2, 2).requires_grad_(False), (torch.ones(1, 2),)), budget_s=0.05)
    assert found.backward_s is None
    assert any("no backward" in note for note in found.notes)


def test_a_trace_without_a_folder_is_refused_before_anything_runs(tmp_path):
    ran = []
    run = Run(lambda x: ran.append(1), (torch.ones(1),))
    with pytest.raises(UsageError, match="folder"):
        profile(run, trace_file=str(tmp_path / "none" / "trace.json"))
    assert ran == []
