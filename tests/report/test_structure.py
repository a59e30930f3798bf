"""Captured values as one readable line, and their tensors by path."""

from __future__ import annotations

import pytest
from tests.report.sample import tensor

from modulelens.records import TensorSpec
from modulelens.report.structure import call_leaves, is_contiguous, leaves, signature, value


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (None, "None"),
        ("relu", "'relu'"),
        ("x" * 60, repr("x" * 40 + "...")),
        ([1, 2.5], "[1, 2.5]"),
        ({"$tuple": [1]}, "(1,)"),
        ({"$tuple": [tensor(2, 3), True]}, "(float32[2,3], True)"),
        ({"a": tensor()}, "{'a': float32[]}"),
        ({"$dict": [[1, "x"]]}, "{1: 'x'}"),
        ({"$float": "inf"}, "inf"),
        ({"$dtype": "bfloat16"}, "torch.bfloat16"),
        ({"$device": "cuda:0"}, "'cuda:0'"),
        ({"$enum": ["torch.nn.attention:SDPBackend", "MATH"]}, "SDPBackend.MATH"),
        ({"$class": "torch.nn:GELU"}, "GELU"),
        ({"$ref": 3}, "<same as object 3>"),
        ({"$opaque": {"type": "a.b:Lock", "why": "native"}}, "<Lock: not kept>"),
        ({"$object": {"cls": "m:Config", "vars": {"dim": 4}}}, "Config(dim=4)"),
        ({"$wormhole": {"left": 1, "right": "b"}}, "wormhole(left=1, right='b')"),
        ({"$range": [0, 4, 1]}, "range()"),
        ({"$enum": "damaged"}, "d.a"),
        ({"$opaque": 7}, "opaque(7)"),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all]"),
    ],
)
def test_a_value_reads_like_python(node: object, text: str) -> None:
    assert value(node) == text


def test_a_signature_names_keywords_and_odd_strides() -> None:
    args = {"$tuple": [tensor(2, 64, stride=(1, 2))]}
    shown = signature(args, {"mask": None, "scale": 0.5})
    assert shown == "(float32[2,64] stride (1,2), mask=None, scale=0.5)"


def test_hostile_text_cannot_reach_the_terminal() -> None:
    node = {"$object": {"cls": "m:\x1b[31mEvil", "vars": {"k\x07": "\x1b]0;x"}}}
    assert value(node).isprintable()


def test_leaves_have_paths_that_read_like_code() -> None:
    output = {
        "logits": tensor(1),
        "past": {
            "$tuple": [[tensor(2)], {"$object": {"cls": "m:Cache", "vars": {"k": tensor(3)}}}]
        },
        "odd": {"$dict": [[7, tensor(4)]]},
    }
    assert [path for path, _ in leaves(output, "output")] == [
        'output["logits"]',
        'output["past"][0][0]',
        'output["past"][1].k',
        'output["odd"][7]',
    ]


def test_arguments_are_named_by_position_or_keyword() -> None:
    found = call_leaves({"$tuple": [tensor(1), None, tensor(2)]}, {"mask": tensor(3)})
    assert [path for path, _ in found] == ["args[0]", "args[2]", "mask"]


@pytest.mark.parametrize(
    ("shape", "stride", "contiguous"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True),
        ((0, 3), (7, 7), True),
        ((), (), True),
        ((4, 4), (0, 1), False),
    ],
)
def test_contiguity_is_that_of_torch(
    shape: tuple[int, ...], stride: tuple[int, ...], contiguous: bool
) -> None:
    assert is_contiguous(TensorSpec(dtype="float32", shape=shape, stride=stride)) is contiguous
