"""What can be done with one entry, through its public door."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.capture import zoo
from tests.capture.loop import add_unverified, rows, same
from torch import Tensor, nn

import modulelens as ml
from modulelens.entry import _import_path
from modulelens.errors import (
    CheckFailed,
    ModuleLensError,
    NotFound,
    NotRebuildable,
    UsageError,
)
from modulelens.measure.worker import Worker

ROOT = Path(__file__).parents[1]
Verdict = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ml.Entry]:
    """A small model with dropout, batch norm and a module called twice, with gradients."""
    torch.manual_seed(0)
    with ml.track_init():
        model = nn.Sequential(zoo.CalledTwice(), nn.BatchNorm1d(4), zoo.WithKwargsOnly())
    with ml.trace(model, name="small", keep=ml.Keep(grads=True)) as trace:
        model(rows()).square().sum().backward()
    repo = tmp_path_factory.mktemp("entry") / "repo"
    return {entry.fqn: entry for entry in add_unverified(trace, repo)}


def test_the_record_is_read_without_torch(entries: dict[str, ml.Entry]) -> None:
    entry = entries["2.inner"]
    code = f"""
        import sys
        import modulelens as ml
        entry = ml.Repo({str(entry._store.root)!r})["small/2.inner"]
        assert entry.model == "small" and entry.fqn == "2.inner" and entry.version == 1
        assert entry.cls == "tests.capture.zoo:KwargsOnly" and entry.name == "small/2.inner"
        assert entry.source.text.startswith("class KwargsOnly(nn.Module):")
        assert entry.grade is None and entry.id.endswith("/1")
        assert repr(entry) == "Entry(small/2.inner@v1: KwargsOnly, 20 params, unverified)"
        assert "torch" not in sys.modules, "reading imports torch"
    """
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_inputs_outputs_and_gradients_are_what_the_step_saw(entries: dict[str, ml.Entry]) -> None:
    args, kwargs = entries["2.inner"].inputs()
    assert args == ()
    assert list(kwargs) == ["x", "mask", "scale"]
    assert kwargs["mask"].dtype is torch.bool
    assert kwargs["scale"] == 2.0
    assert kwargs["x"].requires_grad
    assert same(entries[""].outputs(), entries["2"].outputs())
    grads = entries["2"].grads()
    assert set(grads) == {"outputs", "inputs", "parameters"}
    assert torch.equal(grads["outputs"]["0"], 2 * entries[""].outputs())
    assert list(grads["parameters"]) == ["inner.layer.weight", "inner.layer.bias"]


def test_a_run_gives_the_output_again_and_leaves_the_process_alone(
    entries: dict[str, ml.Entry],
) -> None:
    before = torch.get_rng_state()
    for call in range(2):
        assert torch.equal(entries["0.layer"].run(call=call), entries["0.layer"].outputs(call))
    assert torch.equal(entries["0"].run(), entries["0"].outputs())  # dropout included
    assert torch.equal(torch.get_rng_state(), before)
    module = entries["0"].rebuild()
    assert torch.equal(entries["0"].run(module), entries["0"].outputs())


def test_the_module_itself_is_exact(entries: dict[str, ml.Entry]) -> None:
    for entry in entries.values():
        check = entry.check(backward=True)
        assert check.status is ml.Status.EXACT, (entry, check.reason)
        assert check


def test_a_module_candidate(entries: dict[str, ml.Entry]) -> None:
    entry = entries["0.layer"]
    candidate = entry.rebuild()
    assert entry.check(candidate, backward=True).status.passed
    with torch.no_grad():
        candidate.weight[0] += 0.5
    check = entry.check(candidate)
    assert check.status is ml.Status.MISMATCH_VALUE
    assert check.worst is not None
    assert check.worst.path == "output"
    assert check.worst.mismatched == 3
    assert check.code == "Linear"
    assert not check


class Halved(zoo.CalledTwice):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_class_candidate_takes_the_place_of_the_captured_one(
    entries: dict[str, ml.Entry],
) -> None:
    check = entries["0"].check(Halved)
    assert check.status is ml.Status.MISMATCH_VALUE
    assert check.code == "Halved"
    assert entries["0"].check(zoo.CalledTwice).status.passed


def test_a_function_candidate_gets_the_arguments_or_the_module_too(
    entries: dict[str, ml.Entry],
) -> None:
    layer = entries["0.layer"].rebuild()
    assert entries["0.layer"].check(lambda x: x @ layer.weight.t() + layer.bias).status.passed

    def with_module(module: nn.Module, x: Tensor) -> Tensor:
        return x @ module.weight.t() + module.bias

    assert entries["0.layer"].check(with_module, backward=True).status.passed

    def forgets_bias(module: nn.Module, x: Tensor) -> Tensor:
        return x @ module.weight.t()

    assert entries["0.layer"].check(forgets_bias).status is ml.Status.MISMATCH_VALUE


def test_a_candidate_that_forgets_a_side_effect_is_told_which(
    entries: dict[str, ml.Entry],
) -> None:
    def norm(module: nn.Module, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + module.eps).sqrt()

    check = entries["1"].check(norm)
    assert check.status is ml.Status.MISMATCH_VALUE
    wrong = {leaf.path for leaf in check.leaves if not leaf.status.passed}
    assert 'buffers["running_mean"]' in wrong
    assert "output" not in wrong


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a candidate's code to a new file."""
    folder = tmp_path_factory.mktemp("candidates")

    def write(code: str) -> Path:
        path = folder / f"c{len(list(folder.iterdir()))}.py"
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(code))
        return path

    return write


@pytest.fixture(scope="module")
def verdict(
    entries: dict[str, ml.Entry], written: Callable[[str], Path]
) -> Iterator[Callable[..., tuple[str, str]]]:
    """Status (or the error's code) and reason of what `check("file.py:Mine")` asks a worker."""
    entry = entries["0.layer"]
    with Worker(path=_import_path(), timeout_s=60) as worker:

        def judge(code: str, name: str = "Mine") -> tuple[str, str]:
            task = {"candidate": f"{written(code)}:{name}", "call": None, "backward": False}
            task |= {"notes": os.devnull}
            try:
                found, _ = worker.call("modulelens.tasks:check_task", task | entry._address())
            except ModuleLensError as error:
                return error.code, error.message
            check = msgspec.convert(found, ml.Check)
            return check.status.value, check.reason

        yield judge


GOOD = """
    class Mine(nn.Linear):
        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight.t())

    def with_module(module, x):
        return x @ module.weight.t() + module.bias

    number = 3
"""


def test_a_candidate_of_a_file_is_run_in_a_process_of_its_own(
    entries: dict[str, ml.Entry], written: Callable[[str], Path], verdict: Verdict
) -> None:
    path = written(GOOD)
    check = entries["0.layer"].check(f"{path}:Mine")
    assert check.status.passed, check.reason
    assert check.code == f"{path}:Mine"
    assert str(path) not in {getattr(m, "__file__", "") for m in list(sys.modules.values())}
    assert verdict(GOOD, "with_module")[0] in ("EXACT", "CLOSE")


def test_a_candidate_that_dies_or_never_ends_is_a_status(
    entries: dict[str, ml.Entry], written: Callable[[str], Path]
) -> None:
    path = written("import os\ndef dies(x): os._exit(3)\ndef hangs(x):\n    while True: pass")
    check = entries["0.layer"].check(f"{path}:dies")
    assert check.status is ml.Status.RUNTIME_ERROR
    assert "exited with code 3" in check.reason
    check = entries["0.layer"].check(f"{path}:hangs", timeout_s=2.0)
    assert check.status is ml.Status.TIMEOUT
    assert "2 s" in check.reason


@pytest.mark.parametrize(
    ("code", "name", "status", "says"),
    [
        ("def Mine(x: return x", "Mine", "CANDIDATE_BROKEN", r"c\d+\.py:3: SyntaxError"),
        ("1 / 0", "Mine", "CANDIDATE_BROKEN", r"c\d+\.py:3: ZeroDivisionError"),
        ("raise SystemExit(3)", "Mine", "CANDIDATE_BROKEN", "SystemExit"),
        ("import os; os._exit(3)", "Mine", "WORKER_CRASHED", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "Mine", "WORKER_CRASHED", "SIGSEGV"),
        ("def Mine(x): raise KeyError('inside')", "Mine", "RUNTIME_ERROR", "KeyError: 'inside'"),
        ("def Mine(): return 1", "Mine", "RUNTIME_ERROR", "TypeError"),
        ("def Mine(x): return x[:1]", "Mine", "MISMATCH_SHAPE", "output"),
        ("def Mine(x): return x.double()", "Mine", "MISMATCH_DTYPE", "output"),
        ("def Mine(x): return [x]", "Mine", "MISMATCH_STRUCTURE", "output"),
        ("def Mine(x): return x * float('nan')", "Mine", "MISMATCH_VALUE", "NaN"),
        ("class Mine(nn.Linear):\n    def __init__(s): super().__init__(1, 1)\n"
         "    def forward(s, x): return x", "Mine", "MISMATCH_VALUE", "output"),
    ],
)  # fmt: skip
def test_a_candidate_that_is_wrong_is_told_how(
    verdict: Verdict, code: str, name: str, status: str, says: str
) -> None:
    found, reason = verdict(code, name)
    assert found == status, reason
    assert re.search(says, reason), reason


def test_a_name_that_leads_nowhere_is_an_error_with_the_close_ones(
    entries: dict[str, ml.Entry], written: Callable[[str], Path], verdict: Verdict
) -> None:
    with pytest.raises(NotFound, match="defines no 'mine'") as caught:
        entries["0.layer"].check(f"{written(GOOD)}:mine")
    assert "Mine" in str(caught.value)
    assert verdict(GOOD, "number")[0] == "USAGE_ERROR"
    assert "cannot be called" in verdict(GOOD, "number")[1]


def test_an_export_is_opened_by_plain_torch(entries: dict[str, ml.Entry], tmp_path: Path) -> None:
    path = entries["2.inner"].export(tmp_path / "block.pt")
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert {type(value) for value in loaded.values()} == {Tensor}
    assert 'inputs/0/[1]["x"]' in loaded
    assert torch.equal(loaded["outputs/0/"], entries["2.inner"].outputs())
    assert torch.equal(loaded["state/layer.weight"], entries["2.inner"].rebuild().layer.weight)
    assert b"KwargsOnly" in bytes(loaded["metadata.json"].tolist())
    with pytest.raises(NotFound, match="no folder"):
        entries["2.inner"].export(tmp_path / "missing" / "block.pt")


def test_a_benchmark_and_a_profile_are_kept_with_the_entry(entries: dict[str, ml.Entry]) -> None:
    measured = entries["0.layer"].benchmark(budget_s=0.05)
    assert isinstance(measured, ml.Measurement)
    assert measured.backward
    assert min(measured.times_s) > 0
    compared = entries["0.layer"].benchmark(lambda x: x, backward=False, budget_s=0.05)
    assert isinstance(compared, ml.Comparison)
    assert compared.correct == "MISMATCH_VALUE"
    profile = entries["0.layer"].profile(budget_s=0.05)
    assert profile.flops_forward == 2 * 3 * 4 * 4
    again = ml.Repo(entries["0.layer"]._store.root)["small/0.layer"].metadata
    assert again.measurement == measured
    assert again.profile == profile


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os\ndef Mine(x): os._exit(3)", "RUNTIME_ERROR.*exited with code 3"),
        ("def Mine(x: return x", "RUNTIME_ERROR.*SyntaxError"),
        ("def Mine(x): return x[:1]", "MISMATCH_SHAPE.*output"),
    ],
)
def test_a_candidate_of_a_file_is_timed_only_when_it_works_apart(
    entries: dict[str, ml.Entry], written: Callable[[str], Path], code: str, says: str
) -> None:
    with pytest.raises(CheckFailed, match=says):
        entries["0.layer"].benchmark(f"{written(code)}:Mine", budget_s=0.05)


def test_a_wrong_candidate_of_a_file_is_timed_with_its_verdict(
    entries: dict[str, ml.Entry], written: Callable[[str], Path]
) -> None:
    for backward in (True, False):
        compared = entries["0.layer"].benchmark(
            f"{written('def Mine(module, x): return module(x) * 2')}:Mine",
            backward,
            budget_s=0.05,
        )
        assert isinstance(compared, ml.Comparison)
        assert compared.correct == "MISMATCH_VALUE"
    with pytest.raises(UsageError, match="a budget of 0 s"):
        entries["0.layer"].benchmark(budget_s=0)


def test_an_entry_without_gradients_or_bytes_says_so(tmp_path: Path) -> None:
    model = zoo.CalledTwice()
    with ml.trace(model, keep=ml.Keep(tensors="shape")) as trace:
        model(rows())
    entry = add_unverified(trace, tmp_path / "repo")[0]
    with pytest.raises(NotFound, match="holds no gradients") as missing:
        entry.grads()
    assert "Keep(grads=True)" in missing.value.hint
    with pytest.raises(NotRebuildable, match="only the shape") as caught:
        entry.outputs()
    assert caught.value.reason == "not_kept"
    check = entry.check()
    assert check.status is ml.Status.NOT_COMPARABLE
    assert "synthesised" in check.reason


def test_the_same_code_under_other_threads_is_held_to_its_own(
    entries: dict[str, ml.Entry],
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert entries[""].check(backward=True).status is ml.Status.EXACT
        assert entries[""].benchmark(budget_s=0.02).num_threads == before
    finally:
        torch.set_num_threads(before)


def test_differences_of_two_versions_are_listed(tmp_path: Path) -> None:
    found = []
    for width in (4, 6):
        model = zoo.StarArguments(4, width, 4)
        with ml.trace(model, name="m") as trace:
            model(rows())
        found.append(add_unverified(trace, tmp_path / "repo")[0])
    diff = str(found[0].diff(found[1]))
    assert found[1].version == 2
    assert "params" in diff
