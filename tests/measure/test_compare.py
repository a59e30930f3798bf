"""What a comparison accepts, what it refuses, and what it says about it."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from modulelens.measure.anchor import float64_run
from modulelens.measure.compare import compare, doubts, verdict
from modulelens.measure.run import Run
from modulelens.records import Ambient, Autocast, LeafCheck, Status

NAN, INF = math.nan, math.inf


def one(expected, actual, **how):
    leaves = compare(expected, actual, **how)
    assert len(leaves) == 1
    return leaves[0]


@dataclass
class Pair:
    left: torch.Tensor
    right: object


class Later(torch.Tensor):
    """Does its work when somebody looks."""


EVERY_DTYPE = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4)], ids=str)
@pytest.mark.parametrize("same_code", [True, False])
def test_equal_tensors_of_any_kind_are_exact(dtype, shape, same_code):
    x = torch.rand(shape).mul(3).to(dtype)
    assert one(x, x.clone(), same_code=same_code).status is Status.EXACT
    if x.numel() and dtype is not torch.bool:
        other = (
            (x.to(torch.complex64) * 2 + 5).to(dtype)
            if x.is_complex()
            else (x.float() + 3).to(dtype)
        )
        leaf = one(x, other, same_code=same_code)
        assert leaf.status is Status.MISMATCH_VALUE
        assert leaf.mismatched >= x.numel()


def test_other_strides_and_layouts_with_equal_values_are_exact():
    x = torch.randn(2, 3, 4)
    assert one(x, x.transpose(0, 1).contiguous().transpose(0, 1)).status is Status.EXACT
    leaves = compare(torch.eye(3).to_sparse(), torch.eye(3))
    assert verdict(leaves).status is Status.MISMATCH_STRUCTURE
    assert (
        verdict(compare(torch.eye(3).to_sparse(), torch.eye(3).to_sparse())).status is Status.EXACT
    )


def test_same_code_reports_the_first_wrong_element():
    x = torch.zeros(2, 3)
    y = x.clone()
    y[1, 2] = 0.25
    leaf = one(x, y)
    assert leaf.status is Status.MISMATCH_VALUE
    assert (leaf.max_abs, leaf.mismatched, leaf.numel) == (0.25, 1, 6)
    assert "first at [1, 2]: expected 0.0, got 0.25" in leaf.message
    assert one(torch.tensor([2.0]), torch.tensor([3.0])).max_rel == 0.5


def test_shape_then_dtype():
    assert one(torch.ones(2), torch.ones(2, 1)).status is Status.MISMATCH_SHAPE
    assert one(torch.ones(2), torch.ones(2, 1)).message == "expected float32[2], got float32[2, 1]"
    assert one(torch.ones(2), torch.ones(2).half()).status is Status.MISMATCH_DTYPE
    assert one(torch.ones(2), torch.ones(3).half()).status is Status.MISMATCH_SHAPE


@pytest.mark.parametrize("same_code", [True, False])
def test_nan_and_infinity_must_be_at_the_same_places(same_code):
    x = torch.tensor([1.0, NAN, INF, -INF])
    assert one(x, x.clone(), same_code=same_code).status is Status.EXACT
    for wrong in (
        [NAN] * 4,
        [1.0, 1.0, INF, -INF],
        [1.0, NAN, -INF, -INF],
        [NAN, NAN, INF, -INF],
        [1.0, NAN, INF, INF],
        [1.0, NAN, 1e30, -INF],
    ):
        leaf = one(x, torch.tensor(wrong), same_code=same_code)
        assert leaf.status is Status.MISMATCH_VALUE
        assert "other positions" in leaf.message
        assert leaf.max_abs is None or math.isfinite(leaf.max_abs)


def test_nan_payload_does_not_matter_and_the_rest_is_still_compared():
    x = torch.tensor([1.0, NAN])
    y = torch.tensor([1.0, NAN])
    y.view(torch.int32)[1] += 1
    assert y.isnan()[1]
    assert one(x, y).status is Status.EXACT
    y[0] = 2.0
    leaf = one(x, y)
    assert (leaf.status, leaf.max_abs) == (Status.MISMATCH_VALUE, 1.0)


def test_the_sign_of_zero_is_named():
    leaf = one(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert leaf.status is Status.MISMATCH_VALUE
    assert "sign of 1 zeros" in leaf.message
    other = one(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), same_code=False)
    assert other.status is Status.CLOSE


@pytest.mark.parametrize("same_code", [True, False])
def test_integers_bools_strings_and_none_are_exact(same_code):
    expected = {
        "index": torch.tensor([200000, 7]),
        "mask": torch.tensor([True]),
        "n": 3,
        "s": "a",
        "x": None,
    }
    assert verdict(compare(expected, dict(expected), same_code=same_code)).status is Status.EXACT
    changes = {
        "index": torch.tensor([200001, 7]),
        "mask": torch.tensor([False]),
        "n": 4,
        "s": "b",
        "x": 0,
    }
    for key, value in changes.items():
        check = verdict(compare(expected, expected | {key: value}, same_code=same_code))
        assert check.status is Status.MISMATCH_VALUE
        assert check.worst.path == f'output["{key}"]'
    assert not verdict(compare(1, True)).status.passed
    assert not verdict(compare(1, 1.0)).status.passed


def test_python_floats():
    assert one(0.1, 0.1 + 1e-9).status is Status.MISMATCH_VALUE
    assert one(0.1, 0.1 + 1e-9, same_code=False).status is Status.CLOSE
    assert one(0.1, 0.1, same_code=False).status is Status.EXACT
    assert one(0.1, 0.1002, same_code=False).status is Status.MISMATCH_VALUE
    assert one(NAN, NAN).status is Status.EXACT
    assert not one(NAN, 1.0, same_code=False).status.passed
    assert not one(0.0, 1e-9, same_code=False).status.passed


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        ([torch.ones(1)], "expected a tuple of 2, got a list of 1"),
        ((torch.ones(1),), "2 items, got 1"),
        ({"a": 1}, "tuple"),
        ((torch.ones(1), [2]), "expected int 2, got a list of 1"),
        ((torch.ones(1).as_subclass(Later), 2), "Later"),
        (None, "None"),
    ],
)
def test_structure_comes_first(actual, words):
    check = verdict(compare((torch.ones(1), 2), actual))
    assert check.status is Status.MISMATCH_STRUCTURE
    assert words in check.reason


def test_a_missing_key_is_named():
    check = verdict(compare({"a": torch.ones(1), "b": 1}, {"a": torch.ones(1)}))
    assert check.status is Status.MISMATCH_STRUCTURE
    assert "['a', 'b'], got a dict with keys ['a']" in check.reason


def test_paths_read_like_code():
    expected = {"layers": [Pair(torch.zeros(2), (torch.zeros(1), 1))]}
    actual = {"layers": [Pair(torch.zeros(2), (torch.ones(1), 1))]}
    leaves = compare(expected, actual, path="grad")
    assert [leaf.path for leaf in leaves] == [
        'grad["layers"][0].left',
        'grad["layers"][0].right[0]',
    ]
    assert verdict(leaves).worst.path == leaves[1].path


def test_the_order_of_keys_is_structure():
    a, b = torch.ones(1), torch.zeros(1)
    for kind in (dict, OrderedDict):
        check = verdict(compare([kind(a=a, b=b)], [kind(b=b.clone(), a=a.clone())]))
        assert check.status is Status.MISMATCH_STRUCTURE
    check = verdict(compare([{"x": 1, "y": {}}], [{"y": {}, "x": 2}]))
    text = "output[0]: expected keys in the order ['x', 'y'], got ['y', 'x']"
    assert check.reason == text
    check = verdict(compare({1: a, "2": b}, {"2": b, 1: a}))
    assert "keys in the order ['1', \"'2'\"]" in check.reason


def test_the_order_of_attributes_and_a_shared_tensor_do_not_matter():
    a, b = torch.ones(1), torch.zeros(1)
    left, right = Pair(a, b), Pair.__new__(Pair)
    right.right, right.left = b.clone(), a.clone()
    assert verdict(compare([left], [right])).status is Status.EXACT
    assert verdict(compare((a, a), (a.clone(), a.clone()))).status is Status.EXACT


def test_what_cannot_be_compared_is_no_pass():
    check = verdict(compare((x for x in ()), (x for x in ())))
    assert check.status is Status.NOT_COMPARABLE
    assert not check
    assert verdict([]).status is Status.NOT_COMPARABLE


def test_the_worst_leaf_decides():
    order = [Status.EXACT, Status.CLOSE, Status.MISMATCH_VALUE, Status.MISMATCH_STRUCTURE]
    for i in range(1, len(order) + 1):
        leaves = [LeafCheck(path=str(s), status=s, message="m") for s in order[:i]]
        assert verdict(leaves[::-1]).status is order[i - 1]


# -- another implementation: the honest one passes, the imposters do not -------------------------


class Op(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def rounded(x, dtype):
    return x.to(dtype).to(x.dtype)


def matmul_reordered(a, b):
    half = a.shape[-1] // 2
    return a[:, half:] @ b[half:] + a[:, :half] @ b[:half]


def softmax_own(x):
    y = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return (y / y.sum(-1, keepdim=True)).to(x.dtype)


def mean_own(x):
    return x.float().view(*x.shape[:-1], 4, -1).sum(-1).sum(-1).div(x.shape[-1]).to(x.dtype)


OPS = {
    "matmul": (torch.matmul, matmul_reordered, [(16, 2048), (2048, 16)]),
    "softmax": (lambda x: x.softmax(-1), softmax_own, [(16, 4096)]),
    "mean": (lambda x: x.mean(-1), mean_own, [(16, 65536)]),
    "gelu": (
        nn.functional.gelu,
        lambda x: (x.float() * 0.5 * (1 + (x.float() / 2**0.5).erf())).to(x.dtype),
        [(64, 64)],
    ),
    "tiny": (
        lambda x: (x * 1e-3) ** 2,
        lambda x: ((x.float() * 1e-3).square()).to(x.dtype),
        [(64, 64)],
    ),
}
IMPOSTERS = {
    "bf16": lambda op, x: op(*(rounded(t, torch.bfloat16) for t in x)),
    "tf32": lambda op, x: op(*((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in x)),
    "zeros": lambda op, x: torch.zeros_like(op(*x)),
    "e4m3": lambda op, x: op(*(rounded(t, torch.float8_e4m3fn) for t in x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_the_anchored_rule_tells_honest_from_imposter(name, dtype):
    torch.manual_seed(0)
    op, honest, shapes = OPS[name]
    inputs = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    run = Run(Op(op), inputs)
    twin, why = float64_run(run)
    assert twin is not None, why
    expected, anchor = run.forward(), twin.forward()
    assert anchor.dtype is torch.float64
    good = one(expected, honest(*inputs), anchor=anchor, same_code=False)
    assert good.status.passed, good.message
    names = ["zeros", "bf16", "tf32"] if dtype is torch.float32 else ["zeros", "e4m3"]
    for imposter in names:
        bad = one(expected, IMPOSTERS[imposter](op, inputs), anchor=anchor, same_code=False)
        assert bad.status is Status.MISMATCH_VALUE, (imposter, bad.message)
        assert bad.error_ratio > 4 or dtype is not torch.float32


def test_a_precision_downgrade_inside_a_module_is_found():
    torch.manual_seed(0)
    layer = nn.Linear(256, 64)
    x = torch.randn(8, 256)
    run = Run(layer, (x,))
    twin, _ = float64_run(run)
    low = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()
    leaf = one(run.forward(), low, anchor=twin.forward(), same_code=False)
    assert leaf.status is Status.MISMATCH_VALUE
    assert leaf.error_ratio > 1000
    assert "the original's own" in leaf.message


def test_without_an_anchor_a_scale_relative_rule_is_named():
    expected = torch.randn(4, 64)
    good = compare(expected, expected * (1 + 1e-7), same_code=False)
    assert verdict(good).status is Status.CLOSE
    assert any("fixed tolerance" in text for text in doubts(expected, good))
    bad = compare(expected, rounded(expected, torch.bfloat16), same_code=False)
    assert verdict(bad).status is Status.MISMATCH_VALUE
    small = torch.rand(4, 64) * 1e-5
    assert not verdict(compare(small, torch.zeros_like(small), same_code=False))


def test_a_row_of_zeros_is_no_excuse_and_no_obstacle():
    torch.manual_seed(0)
    hi = torch.randn(4, 8, dtype=torch.float64)
    hi[1] = 0
    expected = hi.float()
    assert one(expected, expected + 1e-8 * (hi != 0), anchor=hi, same_code=False).status.passed
    wrong = expected.clone()
    wrong[1, 3] = 1e-3
    assert not one(expected, wrong, anchor=hi, same_code=False).status.passed
    zeros = torch.zeros(2, 3)
    assert not one(zeros, zeros + 1e-6, anchor=zeros.double(), same_code=False).status.passed


def test_complex_outputs_use_the_same_rule():
    hi = torch.randn(4, 8, dtype=torch.complex128)
    expected = hi.to(torch.complex64)
    assert one(expected, expected * (1 + 3e-8), anchor=hi, same_code=False).status.passed
    assert not one(expected, expected * (1 + 1e-4), anchor=hi, same_code=False).status.passed


def test_an_anchor_that_drew_other_numbers_is_not_believed():
    expected = torch.randn(8, 8)
    stranger = torch.randn(8, 8, dtype=torch.float64)
    leaf = one(expected, torch.zeros(8, 8), anchor=stranger, same_code=False)
    assert not leaf.status.passed
    assert leaf.error_ratio is None


def test_outputs_that_prove_nothing_are_named():
    assert "constant" in doubts(torch.zeros(4, 4), [])[0]
    assert "constant" in doubts({"a": torch.full((3,), True)}, [])[0]
    x = torch.randn(4, 4)
    assert "passed on" in doubts(x + 1e-9, [], inputs=[(x, 3)])[0]
    assert "passed on" in doubts(torch.arange(4), [], inputs={"ids": torch.arange(4)})[0]
    assert doubts(x * 2, [], inputs=[x]) == []
    assert doubts(torch.randn(4, 4), []) == []
    assert doubts(torch.ones(()), []) == []


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.full((1,), 0.5)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids, *, bias):
        return self.drop(self.head(self.embed(ids)) * self.scale + bias + torch.zeros(1))


def test_the_float64_twin_keeps_ties_integers_draws_and_leaves_the_original_alone():
    context = Ambient(autocast=(Autocast(device="cpu", dtype="bfloat16"),))
    run = Run(Tied(), (torch.tensor([1, 2]),), {"bias": torch.ones(5, requires_grad=True)}, context)
    twin, why = float64_run(run)
    assert twin is not None, why
    assert twin.module.head.weight is twin.module.embed.weight
    assert twin.module.head.weight.dtype is torch.float64
    assert twin.args[0].dtype is torch.int64
    for each in (run, twin):
        each.fresh()
        each.out = each.forward()
        each.backward(each.out)
    assert twin.out.dtype is torch.float64
    assert torch.equal(run.out == 0, twin.out == 0)
    assert run.module.head.weight.dtype is torch.float32
    assert twin.gradients()[0]["embed.weight"].dtype is torch.float64
    leaves = compare(
        run.gradients()[1], run.gradients()[1], anchor=twin.gradients()[1], same_code=False
    )
    assert verdict(leaves).status is Status.EXACT


def test_no_twin_has_a_reason():
    twin, why = float64_run(Run(torch.relu, (torch.ones(1),)))
    assert twin is None
    assert "module" in why
