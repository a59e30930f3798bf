"""What a script does besides defining a class does not run again, whatever its names are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from modulelens.rebuild import class_of_script
from modulelens.tree.slices import slice_of

_RAN = """
def loud(value):
    with open({log!r}, "a") as log:
        log.write(f"{{value}} ")
    return value
"""

#: What a class says of a name -> whether the file's own statement of that name is needed.
USES = {
    "def forward(self, name): return name": False,
    "def forward(self, *name, **kw): return name, kw": False,
    "def forward(self, x):\n        name = x\n        return name": False,
    "def forward(self, x):\n        for name in x: pass\n        return name": False,
    "def forward(self, x): return [name for name in x]": False,
    "def forward(self, x): return {name: v for name, v in x}": False,
    "def forward(self, x): return (lambda name: name)(x)": False,
    "def forward(self, x): return (name := x) + name": False,
    "def forward(self, x):\n        import math as name\n        return name": False,
    "def forward(self, x):\n        with x as name: return name": False,
    "def forward(self, x):\n        try: x()\n        except OSError as name: return name": False,
    "def forward(self, x):\n        def name(): return name\n        return name": False,
    "def forward(self, x): return self.name": False,
    "def forward(self, x): return x(name=1)": False,
    "def forward(self, x):\n        match x:\n            case [name, *_]: return name": False,
    "def outer(self, name):\n        def inner(): return name\n        return inner": False,
    "name = 3\n    def forward(self): return self.name": False,
    "name = 3\n    twice = name * 2": False,
    "def name(self): return 1\n    again = name": False,
    "def forward(self):\n        global name\n        name = 3": False,
    "def forward(self, x): return name(x)": True,
    "def forward(self, x=name): return x": True,
    "def forward(self, x: name): return x": True,
    "known: name": True,
    "@name\n    def forward(self): return 1": True,
    "name = name": True,
    "twice = name * 2\n    name = 3": True,
    "name = 3\n    def forward(self): return name": True,
    "def forward(self): return [name + i for i in range(2)]": True,
    "def forward(self): return lambda: name": True,
    "def forward(self):\n        global name\n        name += 1\n        return name": True,
    "class Inner(name): pass": True,
    "def outer(self):\n        def inner():\n            global name\n            return name\n"
    "        return inner": True,
}


@pytest.mark.parametrize("use", USES)
def test_a_name_is_needed_where_the_code_looks_it_up_in_the_file(use: str) -> None:
    text = f"name = object\nclass Layer:\n    {use}\nother = 1\n"
    assert slice_of(ast.parse(text).body, "Layer") == ([0, 1] if USES[use] else [1])


@pytest.mark.parametrize(
    ("statement", "binds"),
    [
        ("kept = [wanted for wanted in range(3)]", False),
        ("kept = (lambda wanted: wanted)(1)", False),
        ("kept = lambda: [0 for wanted in ()]", False),
        ("if True:\n    def kept():\n        wanted = 1", False),
        ("class Other:\n    wanted = 1", False),
        ("def other():\n    global wanted\n    wanted = 1", False),
        ("other.wanted = 1", False),
        ("wanted.size = 1", True),
        ("wanted['size'][0] += 1", True),
        ("wanted.first = wanted.last = (1, 2)", True),
        ("wanted.size = other", False),
        ("wanted[other] = 1", False),
        ("wanted.size = wanted.measure()", False),
        ("wanted.size", False),
        ("wanted.size = lambda: other", False),
        ("first, (wanted, *rest) = range(3), 4", True),
        ("with open('x') as wanted: pass", True),
        ("if True:\n    import a.b as wanted", True),
        ("try:\n    pass\nexcept ValueError:\n    wanted = 1", True),
        ("kept = (wanted := 3)", True),
        ("wanted: int = 3", True),
        ("import wanted.below", True),
    ],
)
def test_a_statement_is_needed_where_it_binds_the_name_in_the_file(
    statement: str, binds: bool
) -> None:
    body = ast.parse(f"{statement}\ndef layer(): return wanted\n").body
    assert slice_of(body, "layer") == ([0, 1] if binds else [1])


def test_what_else_a_script_does_with_the_names_of_a_class_is_not_run(tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "train.py"
    log.touch()
    script.write_text(
        _RAN.format(log=str(log))
        + """
from dataclasses import dataclass
calls = loud("counter")
def scaled(batch, factor=2):
    total = sum(row for row in batch)
    return total * factor
@dataclass
class Settings:
    depth: int = 3
class Layer:
    def __init__(self, width, settings=Settings()):
        self.width, self.settings = width, settings
    def forward(self, batch, mask=None):
        global calls
        calls = (calls, "again")
        out = scaled(batch) if mask is None else mask
        return out, [step for step in range(self.settings.depth)], calls
width = loud("width")
batch, mask = loud("batch"), loud("mask")
for epoch in range(2):
    out = loud("epoch")
total = row = factor = step = loud("training")
self = settings = depth = loud("after")
with open(__file__) as out:
    mask = loud("inside")
"""
    )
    layer = class_of_script(str(script), "Layer")
    assert layer(4).forward([1, 2]) == (6, [0, 1, 2], ("counter", "again"))
    assert log.read_text() == "counter "


def test_a_class_that_cannot_be_compiled_is_told_with_its_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("class Layer:\n    return 3\n")
    with pytest.raises(Exception, match=r"train\.py.*'return' outside function"):
        class_of_script(str(script), "Layer")


@pytest.mark.filterwarnings("error")
def test_what_python_warned_of_once_is_not_warned_of_again() -> None:
    with pytest.warns(SyntaxWarning):
        compile("class Layer:\n    def f(self, x): return x is 'a'\n", "x", "exec")
    text = "size = 3\nclass Layer:\n    def f(self, x): return x is 'a' or size\n"
    assert slice_of(ast.parse(text).body, "Layer") == [0, 1]
