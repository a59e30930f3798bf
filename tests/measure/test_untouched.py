"""A candidate may put whatever it likes in place of what verdicts are formed with."""

from __future__ import annotations

import builtins
import contextlib
from pathlib import Path

import pytest
import torch
from tests.capture.loop import add_unverified, rows
from tests.measure.test_cheats import Block, tracked
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import modulelens as ml
from modulelens.measure.compare import compare
from modulelens.measure.untouched import untouched
from modulelens.records import Status


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> ml.Entry:
    model = tracked(Block)
    with ml.trace(model, modules="", keep=ml.Keep(grads=True)) as trace:
        model(rows())
    return add_unverified(trace, tmp_path_factory.mktemp("untouched") / "repo")[0]


WRONG = "def f(module, x):\n    return module(x) * 3\n"
PATCHES = {
    "equal": "import torch\ntorch.equal = lambda *a: True\n",
    "where": "import torch\ntorch.where = lambda c, a, b: a\ntorch.equal = lambda *a: True\n",
    "methods": "import torch\n"
    "for n in ('any', 'isnan', 'ne', 'sum', 'abs', '__ne__', 'max'):\n"
    "    setattr(torch.Tensor, n, lambda self, *a, **k: torch.zeros((), dtype=torch.bool))\n",
    "cast": "import torch\ntorch.Tensor.to = lambda self, *a, **k: torch.zeros(self.shape)\n"
    "torch.Tensor.view = lambda self, *a: torch.zeros(1)\n",
    "builtins": "import builtins\ndef f(module, x):\n    y = module(x) * 3\n"
    "    builtins.max = lambda *a, **k: None\n    builtins.any = lambda *a: False\n"
    "    return y\n",
    "own": "import modulelens.measure.tolerance as t, modulelens.verify.check as c\n"
    "import modulelens.measure.compare as m\n"
    "ok = m.LeafCheck(path='', status=m.Status.EXACT)\n"
    "t.check_tensor = m.check_tensor = lambda *a, **k: ok\nc.compare = lambda *a, **k: [ok]\n"
    "c.verdict = lambda *a, **k: None\n",
    "mode": "import torch\nfrom torch.overrides import TorchFunctionMode\n"
    "class Says(TorchFunctionMode):\n"
    "    def __torch_function__(self, f, t, a=(), k=None):\n"
    "        return True if f is torch.equal else f(*a, **(k or {}))\n"
    "Says().__enter__()\n",
    "in the call": "import torch\ndef f(module, x):\n    torch.equal = lambda *a: True\n"
    "    return module(x) * 3\n",
}


def test_a_patch_of_a_file_decides_nothing(entry: ml.Entry, tmp_path: Path) -> None:
    path = tmp_path / "patches.py"
    path.write_text(WRONG)
    with contextlib.closing(entry.watch(f"{path}:f")) as verdicts:
        next(verdicts)
        for name, text in PATCHES.items():
            path.write_text(f"# {name}\n" + ("" if "def f" in text else WRONG) + text)
            check = next(verdicts)
            assert check.status is Status.MISMATCH_VALUE, (name, check)
            assert check.reason.startswith("output: error"), name
    path.write_text(WRONG + PATCHES["equal"])
    assert entry.check(f"{path}:f").status is Status.MISMATCH_VALUE


def test_a_patch_that_a_candidate_works_with_stays(entry: ml.Entry, tmp_path: Path) -> None:
    path = tmp_path / "patches.py"
    relu = "import torch\ntorch.Tensor.relu = lambda self: self.clamp_min(0)\ntorch.rely = 3\n"
    path.write_text(relu + "def f(module, x):\n    assert torch.rely == 3\n    return module(x)\n")
    assert entry.check(f"{path}:f").status.passed
    assert entry.check(f"{path}:f", backward=True).status.passed


class Lies(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return torch.equal is func or func(*args, **(kwargs or {}))


class Sees(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_what_was_patched_is_patched_again_after(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(3), torch.zeros(3)
    real = builtins.any
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    monkeypatch.setattr(torch, "added", 1, raising=False)
    monkeypatch.setattr(torch.Tensor, "isnan", None)
    monkeypatch.delattr(torch.Tensor, "__len__")
    monkeypatch.setattr(builtins, "any", lambda _: False)
    with Lies(), Sees() as sees:
        found = compare(a, b)[0].status
    patched = builtins.any is not real, torch.equal(a, b), torch.added, torch.Tensor.isnan
    bare = hasattr(torch.Tensor, "__len__")
    monkeypatch.undo()
    assert found is Status.MISMATCH_VALUE
    assert patched == (True, True, 1, None)
    assert sees.seen == 0
    assert bare == hasattr(torch._C.TensorBase, "__len__")
    assert len(a) == 3


def test_an_error_inside_puts_all_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", None)
    with pytest.raises(TypeError), untouched, untouched:
        torch.equal(3)
    assert torch.equal is None
