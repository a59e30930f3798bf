"""ModuleLens zooms into one PyTorch module of a model that is too big for a workstation.

The public names, in the order of the path: live model -> capture -> repo -> entry -> verdict.
Each is imported when it is first used, so that `import modulelens` stays free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulelens import errors
    from modulelens.capture import Capture, Keep, Trace, end_traces, trace, track_init
    from modulelens.entry import Entry
    from modulelens.measure.flops import register_formula
    from modulelens.records import Check, Comparison, Grade, Measurement, Profile, Status
    from modulelens.repo import Repo

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  in the order of the path
    "track_init",
    "trace",
    "end_traces",
    "Keep",
    "Trace",
    "Capture",
    "Repo",
    "Entry",
    "Check",
    "Status",
    "Grade",
    "Measurement",
    "Comparison",
    "Profile",
    "register_formula",
    "errors",
    "__version__",
]

_HOME = {
    "track_init": "modulelens.capture",
    "trace": "modulelens.capture",
    "end_traces": "modulelens.capture",
    "Keep": "modulelens.capture",
    "Trace": "modulelens.capture",
    "Capture": "modulelens.capture",
    "Repo": "modulelens.repo",
    "Entry": "modulelens.entry",
    "Check": "modulelens.records",
    "Status": "modulelens.records",
    "Grade": "modulelens.records",
    "Measurement": "modulelens.records",
    "Comparison": "modulelens.records",
    "Profile": "modulelens.records",
    "register_formula": "modulelens.measure.flops",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("modulelens.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'modulelens' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
