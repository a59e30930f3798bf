"""Reading, applying and restoring the ambient state of a call, and the random streams."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import modulelens
from modulelens.context import AmbientWatch, RngWatch, preserved_rng, read_ambient, set_rng, under
from modulelens.records import Ambient, Autocast

DRAWS = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "python gauss, cached": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy normal, cached": np.random.randn,
    "torch seed": lambda: torch.manual_seed(11),
    "python seed": lambda: random.seed(11),
    "numpy seed": lambda: np.random.seed(11),
}


def streams() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()


@pytest.fixture
def restored():
    with preserved_rng(), under(read_ambient()):
        yield


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_from_any_stream_is_seen_once(draw, restored):
    np.random.randn()  # a second normal comes from the cache and leaves the twister as it is
    random.gauss(0, 1)
    watch = RngWatch()
    before = watch.read()
    assert watch.read() is before
    draw()
    after = watch.read()
    assert after is not before
    assert watch.read() is after


def test_a_state_with_a_cached_normal_is_restored_bit_for_bit(restored):
    np.random.randn()
    random.gauss(0, 1)
    state, wanted = RngWatch().read(), streams()
    first = (np.random.randn(), random.gauss(0, 1), torch.rand(3).tolist())
    np.random.seed(3)
    set_rng(state)
    assert streams() == wanted
    assert (np.random.randn(), random.gauss(0, 1), torch.rand(3).tolist()) == first


def test_an_unmoved_stream_keeps_its_tensor(restored):
    watch = RngWatch()
    before = watch.read()
    torch.rand(1)
    after = watch.read()
    assert after.python is before.python
    assert after.numpy is before.numpy


def test_another_numpy_bit_generator_is_not_kept_and_not_touched(restored):
    own = np.random.get_bit_generator()
    watch = RngWatch()
    watch.read()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        state = watch.read()
        assert state.numpy is None
        assert watch.read() is not None
    finally:
        np.random.set_bit_generator(own)
    assert watch.read().numpy is not None


def test_preserved_after_an_error():
    before = streams()
    with pytest.raises(ZeroDivisionError), preserved_rng():
        torch.rand(1), random.random(), np.random.rand()
        raise ZeroDivisionError
    assert streams() == before


def test_a_state_read_in_inference_mode_is_a_plain_tensor():
    with torch.inference_mode():
        state = RngWatch().read()
    assert state.torch is not None
    assert not state.torch.is_inference()
    assert state.python is not None
    assert not state.python[0].is_inference()


OTHER = Ambient(
    grad_enabled=False,
    inference_mode=True,
    autocast=(Autocast(device="cpu", dtype="float16"),),
    autocast_cache=False,
    default_dtype="float64",
    num_threads=3,
    onednn=False,
    matmul_precision="medium",
    deterministic=True,
    deterministic_warn_only=True,
    allow_tf32=True,
    cudnn_enabled=False,
    cudnn_benchmark=True,
    cudnn_tf32=False,
    fp32_precision={
        "cuda.matmul": "tf32",
        "cuda.conv": "ieee",
        "cuda.rnn": "ieee",
        "mkldnn.matmul": "bf16",
        "mkldnn.conv": "bf16",
        "mkldnn.rnn": "none",
    },
    sdpa=("math",),
    flush_denormal=True,
)


def test_every_switch_is_applied_and_restored(restored):
    before = read_ambient()
    with under(OTHER):
        assert read_ambient() == OTHER
        with under(before):
            assert read_ambient() == before
        assert read_ambient() == OTHER
    assert read_ambient() == before


def test_switches_are_restored_after_an_error_and_after_the_body_changed_them(restored):
    before = read_ambient()
    with pytest.raises(ZeroDivisionError), under(OTHER):
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.bfloat16)
        raise ZeroDivisionError
    assert read_ambient() == before


def test_mixed_precision_interfaces_are_read_and_restored(restored):
    plain = read_ambient()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    mixed = read_ambient()
    assert mixed.matmul_precision == "mixed"
    with under(plain):
        assert read_ambient() == plain
    assert read_ambient() == mixed


def test_autocast_is_entered_left_and_not_inherited():
    a = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = read_ambient()
        with under(Ambient()):
            assert (a @ a).dtype is torch.float32
        assert (a @ a).dtype is torch.bfloat16
    assert inside.autocast == (Autocast(device="cpu", dtype="bfloat16"),)
    with under(inside):
        assert (a @ a).dtype is torch.bfloat16
    assert (a @ a).dtype is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_autocast_of_an_absent_accelerator_moves_to_the_device_of_the_replay():
    a = torch.ones(2, 2)
    with under(Ambient(autocast=(Autocast(device="cuda", dtype="bfloat16"),)), device="cpu"):
        assert (a @ a).dtype is torch.bfloat16


def test_a_weight_cast_before_a_change_is_not_reused():
    layer = torch.nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stale = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        with under(read_ambient()):
            assert torch.equal(layer(x), stale * 2)


def _precision(name):
    return lambda: torch.set_float32_matmul_precision(name)


@pytest.mark.parametrize(
    "change",
    [
        *map(_precision, ("high", "medium")),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch._C._set_mkldnn_enabled(False),
        lambda: torch.set_autocast_cache_enabled(False),
        lambda: torch.set_flush_denormal(True),
    ],
)
def test_a_watch_sees_every_switch_that_moves(restored, change):
    watch = AmbientWatch()
    before = watch.read()
    assert watch.read() is before
    change()
    assert watch.read() == read_ambient() != before


def test_a_watch_sees_the_type_of_autocast_change(restored):
    watch = AmbientWatch()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert watch.read() == read_ambient()
    assert watch.read().autocast == ()


def test_denormals_are_flushed_as_they_were_at_the_call(tmp_path, restored):
    model, x, found = torch.nn.LeakyReLU(2.0**-10), torch.full((3,), -(2.0**-120)), []

    def leaves_it_moved(x):
        out = model(x)
        torch.set_flush_denormal(not read_ambient().flush_denormal)
        return out

    for flush in (True, False):
        torch.set_flush_denormal(flush)
        with modulelens.trace(model, name=f"flush {flush}") as trace:
            found.append(model(x)[0].item())
        torch.set_flush_denormal(not flush)
        [entry] = modulelens.Repo(tmp_path).add(trace)
        assert str(entry.grade) == "exact"
        assert entry.metadata.calls[0].context.ambient.flush_denormal is flush
        for candidate in (None, leaves_it_moved):
            assert entry.check(candidate).status is modulelens.Status.EXACT
            assert read_ambient().flush_denormal is not flush
        out = entry.run()
        torch.set_flush_denormal(False)  # reading it is arithmetic as well
        assert out[0].item() == found[-1]
    assert found == [0.0, -(2.0**-130)]


def test_the_switch_for_denormals_is_read_right_when_it_was_on_before_the_import():
    code = (
        "import torch; torch.set_flush_denormal(True)\n"
        "from modulelens.context import read_ambient\n"
        "print(read_ambient().flush_denormal, torch.set_flush_denormal(False),"
        " read_ambient().flush_denormal)"
    )
    words = [sys.executable, "-B", "-c", code]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert out.split() == ["True", "True", "False"]
