"""FLOPs against counts made by hand; a multiply-add is 2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modulelens.measure.flops import _FORMULAS, count_flops, register_formula
from modulelens.measure.run import Run
from modulelens.records import Ambient


def count(module, *args, backward=True, **how):
    found = count_flops(Run(module, args, **how), backward=backward)
    return found.forward, found.backward, found.unknown


def grad(*shape):
    return torch.randn(shape, requires_grad=True)


def test_linear_backward_depends_on_whether_the_input_needs_a_gradient():
    forward = 2 * 6 * 4 * 5
    assert count(nn.Linear(4, 5), torch.randn(2, 3, 4)) == (forward, forward, {})
    assert count(nn.Linear(4, 5), grad(2, 3, 4)) == (forward, 2 * forward, {})


def test_composite_operators_are_seen_through_in_inference_mode():
    context = Ambient(grad_enabled=False, inference_mode=True)
    assert count(nn.Linear(4, 5), torch.randn(3, 4), context=context)[0] == 2 * 3 * 4 * 5


CONVOLUTIONS = [
    (nn.ConvTranspose2d(32, 1, 3), (1, 32, 1, 1), 2 * 32 * 1 * 9),
    (nn.ConvTranspose2d(6, 12, 2, 2), (2, 6, 5, 7), 2 * 2 * 6 * 12 * 4 * 35),
    (nn.ConvTranspose2d(4, 6, 2, 2, groups=2), (1, 4, 3, 3), 2 * 9 * 4 * 3 * 4),
    (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 5, 5), 2 * 2 * 25 * 8 * 3 * 9),
    (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 5, 5), 2 * 9 * 8 * 9),
    (nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9), 2 * 2 * 4 * 6 * 2 * 3),
]


@pytest.mark.parametrize(("module", "shape", "forward"), CONVOLUTIONS, ids=lambda p: str(p)[:60])
def test_convolutions(module, shape, forward):
    assert count(module, grad(*shape)) == (forward, 2 * forward, {})
    assert count(module, torch.randn(shape)) == (forward, forward, {})


def test_a_large_transposed_convolution_counts_input_positions():
    module = nn.ConvTranspose2d(192, 384, 2, 2, bias=False, device="meta")
    x = torch.empty(6, 192, 30, 96, device="meta")
    assert count(module, x, backward=False)[0] == 2 * 6 * 192 * 384 * 4 * 30 * 96


class Attends(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_on_the_cpu(heads):
    q, k, v = grad(2, 4, 6, 8), grad(2, heads, 10, 8), grad(2, heads, 10, 8)
    product = 2 * 2 * 4 * 6 * 10 * 8
    assert count(Attends(), q, k, v) == (2 * product, 5 * product, {})


def test_attention_by_the_plain_path():
    q = grad(2, 4, 6, 8)
    product = 2 * 2 * 4 * 6 * 6 * 8
    assert count(Attends(), q, q, q, context=Ambient(sdpa=("math",))) == (
        2 * product,
        4 * product,
        {},
    )


@pytest.mark.parametrize("kind", ["attention", "encoder layer"])
def test_fused_inference_paths_count_as_much_as_what_they_fuse(kind):
    torch.manual_seed(0)
    if kind == "attention":
        module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        x = torch.randn(2, 5, 8)
        args = x, torch.randn(2, 5, 8), x
        call = lambda m, context: count(m, *args, context=context)[0]  # noqa: E731
    else:
        module = nn.TransformerEncoderLayer(8, 2, 20, batch_first=True).eval()
        call = lambda m, context: count(m, torch.randn(2, 5, 8), context=context)[0]  # noqa: E731
    fused = call(module, Ambient(grad_enabled=False))
    plain = call(module, Ambient())
    assert fused == plain > 0


def test_fused_recurrent_layers():
    module = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    one = 2 * 5 * 2 * 16
    forward = one * (2 * (3 + 4) + 2 * (8 + 4))
    assert count(module, grad(5, 2, 3)) == (forward, 2 * forward, {})


def test_recurrent_cells_and_small_products():
    assert count(nn.GRUCell(3, 4), torch.randn(2, 3))[0] == 2 * 2 * 12 * (3 + 4)
    assert count(torch.mv, torch.randn(3, 4), torch.randn(4))[0] == 24
    assert count(torch.dot, torch.randn(4), torch.randn(4))[0] == 8
    assert count(lambda a, b: torch.einsum("ij,kj->ik", a, b), grad(3, 4), grad(5, 4)) == (
        120,
        240,
        {},
    )


class SharedByThree(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(100, 100)
        self.parts = nn.ModuleList(nn.Sequential(shared) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_a_shared_module_counts_each_time_it_runs():
    assert count(SharedByThree(), torch.randn(1, 100))[0] == 60_000


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        body = lambda x: self.b(self.a(x).relu())  # noqa: E731
        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)


def test_recomputation_counts_as_backward_and_only_what_ran():
    one = 2 * 3 * 4 * 4
    forward, backward, _ = count(Checkpointed(), grad(3, 4))
    assert forward == 2 * one
    # Recomputation stops once the saved tensors are there: the last product is not needed again.
    assert backward == 4 * one + one


class ElementwiseOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.bag = nn.LayerNorm(4), nn.EmbeddingBag(10, 4)

    def forward(self, ids):
        return nn.functional.interpolate(self.norm(self.bag(ids)).relu()[None], 8).sort().values


def test_elementwise_operators_and_lookups_are_zero_by_policy():
    assert count(ElementwiseOnly(), torch.tensor([[1, 2]])) == (0, 0, {})


@torch.library.custom_op("lens_test::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


product.register_autograd(
    lambda ctx, g: (product(g, ctx.saved_tensors[0].t()), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def test_a_custom_operator_is_unknown_until_somebody_gives_a_formula():
    call = lambda a, b: product(product(a, b), b)  # noqa: E731
    args = grad(2, 3), torch.randn(3, 3)
    assert count(call, *args)[2] == {"lens_test::product": 4}
    register_formula(torch.ops.lens_test.product, lambda a, b, out_shape: 2 * a[0] * a[1] * b[1])
    try:
        assert count(call, *args) == (2 * 36, 2 * 36, {})
    finally:
        del _FORMULAS["lens_test::product"]


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.fft.fft, lambda x: torch.cdist(x, x)])
def test_torchs_own_arithmetic_without_a_formula_is_unknown_too(function):
    assert count(function, torch.eye(3))[2]


def test_a_formula_that_fails_makes_the_operator_unknown():
    register_formula("lens_test::product", lambda a: 0)
    try:
        assert count(product, torch.ones(2, 2), torch.ones(2, 2))[2] == {"lens_test::product": 1}
    finally:
        del _FORMULAS["lens_test::product"]
