"""A record from elsewhere is data: it ends in a value or a named error, and nothing is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modulelens.errors import Corrupted, ModuleLensError, NotRebuildable
from modulelens.rebuild import Tensors
from modulelens.tree import Decoder, Importer
from modulelens.tree.decode import _RULES
from modulelens.tree.tensors import SPECIAL_KINDS

WATCHED = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
events: list[str] = []
armed = [False]
sys.addaudithook(lambda event, _: armed[0] and event in WATCHED and events.append(event))


def decode(node: Any, *packages: str) -> Any:
    def storage(_: object) -> torch.UntypedStorage:
        return torch.UntypedStorage(64)

    armed[0] = True
    try:
        return Decoder(Tensors(storage).get, Importer(packages)).decode(node)
    finally:
        armed[0] = False
        assert not events


OUTSIDE = [
    *("os:system", "subprocess:Popen", "builtins:eval", "builtins:exec", "builtins:open"),
    *("builtins:__import__", "shutil:rmtree", "importlib:import_module", "sys:exit"),
    *("torch.serialization:os.system", "torch.hub:urlopen", "collections:_sys.exit"),
    *("torch:os.system", "torch.hub:load", "torch:load", "torch.utils.cpp_extension:load"),
    *("torch:sys", "torch.nn.modules.module:torch.load", "pathlib:os.system", "types:sys.exit"),
    *("nowhere:thing", "tests.tree.values:torch.load", "", ":", "os", "torch.", "torch..nn:Linear"),
]


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("kind", ["$function", "$class", "$object", "$enum", "$partial"])
def test_what_lies_outside_the_allowed_packages_is_refused(path: str, kind: str) -> None:
    body: Any = {
        "$object": {"cls": path},
        "$enum": [path, "x"],
        "$partial": [{"$function": path}, [], {}],
    }.get(kind, path)
    with pytest.raises(ModuleLensError):
        decode({kind: body})


def test_a_module_that_is_not_allowed_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "canary_of_tests.py").write_text("raise SystemError('imported')\nclass X: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for node in (
        {"$class": "canary_of_tests:X"},
        {"$object": {"cls": "canary_of_tests:X"}},
        {"$pymodule": "canary_of_tests"},
        {"$dict": [[{"$enum": ["canary_of_tests:X", "A"]}, 1]]},
        {"$subclass": {"cls": "canary_of_tests:X", "inner": {}, "context": None, "shape": []}},
    ):
        with pytest.raises(NotRebuildable, match="outside the packages allowed") as caught:
            decode(node)
        assert caught.value.reason == "untrusted_class"
        assert "allow=['canary_of_tests']" in caught.value.hint
    assert "canary_of_tests" not in sys.modules
    with pytest.raises(ModuleLensError, match="imported"):
        decode({"$class": "canary_of_tests:X"}, "canary_of_tests")


def test_modules_are_no_plain_data_and_functions_no_classes() -> None:
    for node in (
        {"$object": {"cls": "torch.nn:Linear"}},
        {"$object": {"cls": "torch:relu"}},
        {"$object": {"cls": "types:FunctionType"}},
        {"$object": {"cls": "torch:Tensor"}},
        {"$enum": ["torch:Tensor", "x"]},
        {"$structseq": ["torch:Tensor", []]},
        {"$subclass": {"cls": "torch.nn:Linear", "inner": {}, "context": None, "shape": []}},
        {"$module": {"number": 0}},
    ):
        with pytest.raises(ModuleLensError):
            decode(node)


def test_references_stay_within_their_bytes() -> None:
    spec = {"dtype": "float32", "shape": [4], "stride": [1]}
    sound = {"$tensor": {"spec": spec, "group": 0, "key": "a"}}
    assert decode(sound).shape == (4,)
    for change in (
        {"shape": [17]},
        {"shape": [4], "stride": [6]},
        {"shape": [1 << 60], "stride": [1]},
        {"shape": [-4], "stride": [1]},
        {"shape": [4], "stride": [-1]},
        {"shape": [2, 2], "stride": [1]},
        {"dtype": "float99"},
        {"dtype": "load"},
        {"dtype": "__doc__"},
    ):
        with pytest.raises(ModuleLensError, match=r"points outside|no dtype|cannot be read"):
            decode({"$tensor": {"spec": spec | change, "group": 0, "key": "a"}})
    for offset in (13, -1, 1 << 62):
        with pytest.raises(ModuleLensError):
            decode({"$tensor": {"spec": spec, "group": 0, "key": "a", "offset": offset}})


def test_blocks_of_a_table_fit_into_it() -> None:
    spec = {"dtype": "float32", "shape": [2, 4], "stride": [4, 1]}
    block = {"$tensor": {"spec": spec, "group": 0, "key": "a"}}
    both = [{"at": [0, 0], "block": block}, {"at": [2, 0], "block": block}]
    sound = {"local": both, "blocks": [0, 1], "shape": [4, 4], "ranks": [0]}
    assert decode({"$blocks": sound}).shape == (4, 4)
    for change in (
        {"shape": [1 << 40, 4]},
        {"shape": [-4, -4]},
        {"shape": [4, 4, 1]},
        {"shape": None},
        {"local": [both[0], {"at": [3, 0], "block": block}]},
        {"local": [both[0], {"at": [2, 1], "block": block}]},
        {"local": [both[0], {"at": [1 << 70, 0], "block": block}]},
        {"local": [{"at": [0, 0]}] * 2},
        {"local": ["x", "y"]},
        {"blocks": [0, 1, 2]},
    ):
        with pytest.raises(ModuleLensError):
            decode({"$blocks": sound | change})


def test_indices_of_sparse_tensors_are_checked() -> None:
    ints = {"dtype": "int64", "shape": [1, 1], "stride": [1, 1]}
    one = {"dtype": "float32", "shape": [1], "stride": [1]}

    def tensors(ref: Any) -> torch.Tensor:
        return torch.tensor([[99]]) if ref.spec.dtype == "int64" else torch.ones(1)

    body = {
        "size": [3],
        "is_coalesced": True,
        "indices": {"$tensor": {"spec": ints, "group": 0, "key": "i"}},
        "values": {"$tensor": {"spec": one, "group": 1, "key": "v"}},
    }
    with pytest.raises(Corrupted, match="index"):
        Decoder(tensors, Importer()).decode({"$sparse": body})


def test_nesting_has_an_end() -> None:
    for wrap in (lambda n: [n], lambda n: {"a": n}, lambda n: {"$tuple": [n]}):
        node: Any = 1
        for _ in range(5000):
            node = wrap(node)
        with pytest.raises(Corrupted, match="nested more than"):
            decode(node)


KINDS = sorted({*_RULES, *SPECIAL_KINDS, "$tensor", "$parameter", "$unknown", "$intern"})
paths = st.sampled_from(
    ["torch:Tensor", "torch:relu", "collections:OrderedDict", "torch.nn:Linear", "os:system"]
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | paths
fields = ["cls", "items", "vars", "slots", "value", "spec", "shape", "state", "device", "dtype"]
fields += ["data", "layout", "indices", "values", "parts", "inner", "context", "type", "why"]
fields += ["outer", "steps", "cells", "defaults", "legacy", "number", "node", "group", "key"]


def _nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = inner | st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(fields), inner)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
        st.builds(lambda kind, b: {kind: b}, st.sampled_from(KINDS), body),
    )


@given(st.recursive(leaves, _nodes, max_leaves=8))
@settings(max_examples=600, deadline=None)
def test_any_json_ends_in_a_value_or_a_named_error(node: Any) -> None:
    try:
        decode(node)
    except ModuleLensError as error:
        assert error.message
