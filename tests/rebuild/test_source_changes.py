"""Code that changed, moved or went away since the capture: today's code runs, and it is said."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.loop import add_unverified, rows

import modulelens as ml
from modulelens.errors import ClassNotFound, EnvironmentLacks, NotFound, UsageError

LAYER = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        return self.lin(x).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.layer(x))
"""
HELPED = LAYER.replace(
    "self.lin = nn.Linear(width, width)",
    "self.lin = nn.Linear(width, width); self.act = make_act(); self.scale = helper.SCALE",
).replace("self.lin(x).relu()", "self.act(self.lin(x)) * self.scale")
HELPED = f"""import HELPER as helper
{HELPED}
SLOPE = 0.1

def make_act():
    return nn.LeakyReLU(SLOPE)
"""
_count = itertools.count()


class Home:
    """A package of the user's, and a repo with a model of it."""

    def __init__(
        self,
        folder: Path,
        elsewhere: Callable[..., Any],
        text: str = LAYER,
        *,
        helper: str = "SCALE = 1.5\n",
        change: Callable[[Any], object] = id,
    ) -> None:
        self.package = f"layers_of_test_{next(_count)}"
        self.folder = folder / "code"
        self.folder.mkdir()
        self.file = self.folder / f"{self.package}.py"
        self.helper = self.folder / f"{self.package}_helper.py"
        self.helper.write_text(helper)
        self.file.write_text(text.replace("HELPER", self.helper.stem))
        self.repo = folder / "repo"
        self._elsewhere = elsewhere
        self._change = change
        self.entries = self._trace()

    def _trace(self) -> dict[str, ml.Entry]:
        torch.manual_seed(0)
        sys.path.insert(0, str(self.folder))
        try:
            with ml.track_init():
                model = importlib.import_module(self.package).Net()
                self._change(model)
        finally:
            sys.path.remove(str(self.folder))
        with ml.trace(model, name="net", keep=ml.Keep(grads=True)) as trace:
            model(rows()).sum().backward()
        return {e.fqn: e for e in add_unverified(trace, self.repo)}

    def edit(self, old: str, new: str, file: Path | None = None) -> None:
        file = file or self.file
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def check(self, fqn: str = "layer", **options: Any) -> Any:
        """As a new process sees it, without this one's path."""
        ref = self.entries[fqn].id
        return self._elsewhere("check", repo=str(self.repo), ref=ref, **options)

    def rebuild(self, fqn: str = "layer", **options: Any) -> Any:
        ref = self.entries[fqn].id
        return self._elsewhere("rebuild", repo=str(self.repo), ref=ref, **options)


@pytest.fixture
def home(tmp_path: Path, elsewhere: Callable[..., Any]) -> Iterator[Home]:
    made = Home(tmp_path, elsewhere)
    yield made
    sys.modules.pop(made.package, None)


@pytest.fixture
def helped(tmp_path: Path, elsewhere: Callable[..., Any]) -> Iterator[Home]:
    made = Home(tmp_path, elsewhere, HELPED)
    yield made
    for name in (made.package, made.helper.stem):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("fqn", ["layer", ""])
@pytest.mark.parametrize(
    ("old", "new"),
    [("SLOPE = 0.1", "SLOPE = 0.5"), ("nn.LeakyReLU(SLOPE)", "nn.ReLU()")],
)
def test_what_a_constructor_takes_from_beside_its_class_is_todays(
    helped: Home, fqn: str, old: str, new: str
) -> None:
    helped.edit(old, new)
    found = helped.check(fqn)
    assert found["status"] == "MISMATCH_VALUE"
    assert any("beside the captured classes changed" in text for text in found["warnings"])


def test_what_a_constructor_takes_from_another_file_is_todays(helped: Home) -> None:
    helped.edit("SCALE = 1.5", "SCALE = 2.5", helped.helper)
    found = helped.check()
    assert found["status"] == "MISMATCH_VALUE"
    assert any(helped.helper.stem in text for text in found["warnings"])
    helped.edit("SCALE = 2.5", "# as it was\nSCALE = 1.5", helped.helper)
    found = helped.check()
    assert (found["status"], found.get("warnings", [])) == ("EXACT", [])


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from HELPER import SCALE", "SCALE"),
        ("from HELPER import SCALE as size", "size"),
        ("from HELPER import *", "SCALE"),
        ("import HELPER", "HELPER.SCALE"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_however_it_is_imported(
    tmp_path: Path, elsewhere: Callable[..., Any], line: str, name: str, inside: bool
) -> None:
    if inside and "*" in line:
        pytest.skip("Python has no star import inside a function")
    text = HELPED.replace("import HELPER as helper", "" if inside else line)
    body = f"{line}\n        self.lin" if inside else "self.lin"
    text = text.replace("self.lin = nn", f"{body} = nn").replace("helper.SCALE", name)
    home = Home(tmp_path, elsewhere, text)
    home.edit("SCALE = 1.5", "SCALE = 2.5", home.helper)
    assert home.check()["status"] == "MISMATCH_VALUE"
    for loaded in (home.package, home.helper.stem):
        sys.modules.pop(loaded, None)


def test_a_base_in_another_file_is_part_of_the_class(
    tmp_path: Path, elsewhere: Callable[..., Any]
) -> None:
    text = HELPED.replace("class Layer(nn.Module)", "class Layer(helper.Base)")
    text = text.replace("nn.LeakyReLU(SLOPE)", "nn.ReLU()").replace("= make_act()", "= self.made()")
    base = "from torch import nn\nSCALE = 1.5\n\nclass Base(nn.Module):\n"
    base += "    def made(self):\n        return nn.LeakyReLU(0.1)\n"
    home = Home(tmp_path, elsewhere, text, helper=base)
    assert home.check()["status"] == "EXACT"
    home.edit("LeakyReLU(0.1)", "LeakyReLU(0.4)", home.helper)
    assert home.check()["status"] == "MISMATCH_VALUE"
    for loaded in (home.package, home.helper.stem):
        sys.modules.pop(loaded, None)


def test_what_the_class_does_not_reach_may_change(
    tmp_path: Path, elsewhere: Callable[..., Any]
) -> None:
    def other_head(model: Any) -> None:  # today's constructor would make the old one
        model.last = torch.nn.Linear(4, 3)

    home = Home(tmp_path, elsewhere, HELPED, change=other_head)
    home.edit("SCALE = 1.5", "SCALE = 1.5  # as before\nOTHER = 2", home.helper)
    home.edit("SLOPE = 0.1", "def unused():\n    return OTHER\n\nSLOPE = 0.1\nOTHER = 3")
    for fqn in ("", "layer", "last"):
        found = home.check(fqn)
        assert (found["status"], found.get("warnings", [])) == ("EXACT", [])
    # A child's own edit is the child's: its parent is not made anew for it.
    home.edit("* self.scale", "* self.scale * 1.0")
    assert home.check("")["status"] in ("EXACT", "CLOSE")
    for loaded in (home.package, home.helper.stem):
        sys.modules.pop(loaded, None)


@pytest.mark.parametrize(
    "typo",
    [
        ("self.lin = nn.Linear", "self.norm = nn.LayerNom(4); self.lin = nn.Linear"),
        ("def __init__(self, width)", "def __init__(self, width, depth)"),
        ("nn.LeakyReLU(SLOPE)", "nn.LeakyReLU(SLOP)"),
    ],
)
def test_a_constructor_that_raises_today_is_told(helped: Home, typo: tuple[str, str]) -> None:
    helped.edit(*typo)
    for fqn in ("layer", ""):
        found = helped.check(fqn)
        assert found["status"] == "RUNTIME_ERROR"
        assert "constructor raised" in found["reason"]


def test_a_process_that_knows_nothing_finds_the_class_where_it_was(home: Home) -> None:
    assert home.check()["status"] == "EXACT"
    assert home.check("", backward=True)["status"] == "EXACT"
    assert not home.check().get("warnings")


def test_an_edited_class_is_run_as_it_is_today_and_the_leaf_is_named(home: Home) -> None:
    home.edit("self.lin(x).relu()", "self.lin(x).relu() * 1.5")
    found = home.check()
    assert found["status"] == "MISMATCH_VALUE"
    assert found["reason"].startswith("output:")
    assert found["warnings"][0] == f"source of {home.package}:Layer changed since the capture"
    root = home.check("")
    assert root["status"] == "MISMATCH_VALUE"
    assert home.check("last")["status"] == "EXACT"


def test_an_edit_that_computes_the_same_passes_with_a_warning(home: Home) -> None:
    home.edit("self.lin(x).relu()", "torch.relu(self.lin(x))")
    found = home.check(backward=True)
    assert found["status"] in ("EXACT", "CLOSE")
    assert "changed since the capture" in found["warnings"][0]


def test_an_edit_that_adds_an_attribute_runs_its_constructor(home: Home) -> None:
    home.edit(
        "self.lin = nn.Linear(width, width)", "self.lin = nn.Linear(width, width); self.k = 2"
    )
    home.edit("self.lin(x).relu()", "self.lin(x).relu() * self.k / 2")
    assert home.check()["status"] in ("EXACT", "CLOSE")
    assert home.check("")["status"] in ("EXACT", "CLOSE")


def test_an_edit_that_adds_a_parameter_keeps_the_captured_ones(home: Home) -> None:
    home.edit(
        "self.lin = nn.Linear(width, width)",
        "self.lin = nn.Linear(width, width); self.gain = nn.Parameter(torch.ones(width))",
    )
    home.edit("self.lin(x).relu()", "self.lin(x).relu() * self.gain")
    assert home.check()["status"] in ("EXACT", "CLOSE")
    state = home.rebuild()["state"]
    assert state["gain"] == [1.0] * 4
    assert state["lin.weight"] == home.entries["layer"].rebuild().lin.weight.tolist()


def test_an_edit_that_changes_shape_or_structure_is_told_as_that(home: Home) -> None:
    home.edit("self.lin(x).relu()", "self.lin(x).relu()[:1]")
    assert home.check()["status"] == "MISMATCH_SHAPE"
    home.edit("self.lin(x).relu()[:1]", "(self.lin(x).relu(), None)")
    assert home.check()["status"] == "MISMATCH_STRUCTURE"
    home.edit("(self.lin(x).relu(), None)", "self.lin(x).relu().double()")
    assert home.check()["status"] == "MISMATCH_DTYPE"


def test_an_edit_that_raises_is_told_with_file_and_line(home: Home) -> None:
    home.edit("self.lin(x).relu()", "self.lin(x).no_such_method()")
    found = home.check()
    assert found["status"] == "RUNTIME_ERROR"
    assert "no_such_method" in found["reason"]
    assert f"{home.package}.py:11" in found["reason"]


def test_a_constructor_that_wants_other_arguments_now_is_told(home: Home) -> None:
    home.edit("def __init__(self, width):", "def __init__(self, width, *, depth):")
    found = home.check()
    assert found["status"] == "RUNTIME_ERROR"
    assert "depth" in found["reason"]
    assert found["warnings"]
    # The structure is rebuilt without the constructor: nothing is lost.
    assert home.rebuild()["output"] == home.entries["layer"].outputs().tolist()


def test_a_moved_class_is_found_through_class_map(home: Home) -> None:
    moved = home.folder / f"{home.package}_new.py"
    moved.write_text(LAYER.replace("class Layer", "class Better").replace("Layer(4)", "Better(4)"))
    home.edit("class Layer", "class Gone")
    with pytest.raises(ClassNotFound, match=f"{home.package}:Layer is gone") as caught:
        home.rebuild()
    assert "class_map" in caught.value.hint
    new = f"{home.package}_new:Better"
    for old in (f"{home.package}:Layer", "Layer", f"{home.package}.Layer"):
        found = home.rebuild(path=str(home.folder), class_map={old: new})
        assert found["cls"] == new
        assert found["output"] == home.entries["layer"].outputs().tolist()
    root = home.rebuild("", path=str(home.folder), class_map={"Layer": new})
    assert root["output"] == home.entries[""].outputs().tolist()
    with pytest.raises(NotFound, match="class_map names 'Other', which is no class of net/layer"):
        home.rebuild(path=str(home.folder), class_map={"Other": new})


def test_a_deleted_class_and_a_deleted_file_are_named_with_the_next_step(home: Home) -> None:
    home.edit("class Layer", "class Gone")
    with pytest.raises(ClassNotFound, match="has no 'Layer'"):
        home.rebuild()
    home.file.unlink()
    with pytest.raises(ClassNotFound, match=f"No module named '{home.package}'") as caught:
        home.rebuild()
    assert "PYTHONPATH" in caught.value.hint
    found = home.check()
    assert found["status"] == "RUNTIME_ERROR"
    assert home.package in found["reason"]
    assert home.check("last")["status"] == "EXACT"  # torch's own class needs nothing of the user's


def test_a_missing_package_is_named(home: Home) -> None:
    home.edit("import torch\n", "import torch\nimport a_package_that_is_not_here\n")
    with pytest.raises(ClassNotFound, match="No module named 'a_package_that_is_not_here'") as e:
        home.rebuild()
    assert "install or add to PYTHONPATH what provides 'a_package_that_is_not_here'" in e.value.hint


def test_a_module_that_fails_on_import_is_named(home: Home) -> None:
    home.edit("import torch\n", "import torch\n1 / 0\n")
    with pytest.raises(ClassNotFound, match="ZeroDivisionError") as caught:
        home.rebuild()
    assert f"import {home.package}" in caught.value.hint
    home.edit("1 / 0\n", "def broken(:\n")
    with pytest.raises(ClassNotFound, match="SyntaxError"):
        home.rebuild()


def test_a_class_replaced_by_a_function_is_no_class(home: Home) -> None:
    home.edit("class Net", "def Layer(width): return None\n\nclass Net")
    with pytest.raises(ClassNotFound, match=r"is no nn\.Module class"):
        home.rebuild()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def broken(:\n", r"SyntaxError: .*{package}\.py:\d+\)"),
        ("x = '\0'\n", r"(?m)null bytes$"),
        ("1 / 0\n", r"ZeroDivisionError: .*{package}\.py:\d+\)"),
        ("import a_package_that_is_not_here\n", r"No module named .*{package}\.py:\d+\)"),
        ("import layers_beside\n", r"null bytes \(.*{package}\.py:\d+\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_no_class_that_moved(
    home: Home, text: str, says: str
) -> None:
    (home.folder / "layers_beside.py").write_text("\0")
    home.edit("import torch\n", f"import torch\n{text}")
    with pytest.raises(ClassNotFound, match=says.format(package=home.package)) as caught:
        home.rebuild()
    assert caught.value.did_you_mean == ()
    assert "importlib" not in caught.value.message


def test_a_device_that_is_not_here_is_refused_by_name(home: Home) -> None:
    entry = home.entries["last"]
    assert entry.rebuild(device=torch.device("cpu")).weight.device.type == "cpu"  # type: ignore[arg-type]
    assert entry.rebuild(device="meta").weight.is_meta
    uses: list[Callable[[Any], object]] = [
        lambda device: entry.rebuild(device=device),
        lambda device: entry.inputs(device=device),
        lambda device: entry.benchmark(device=device),
        lambda device: entry.profile(device=device),
    ]
    for use in uses:
        for device in ("nope", "", "cpu:x", ["cpu"], "CUDA"):
            with pytest.raises(UsageError, match="is no device"):
                use(device)
        for device in ("cuda:99", "hpu", "vulkan", torch.device("xla")):
            with pytest.raises(EnvironmentLacks, match="cannot be used here") as caught:
                use(device)
            assert type(caught.value) is EnvironmentLacks
