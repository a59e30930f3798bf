"""ModuleLens zooms into one PyTorch module of a model that is too big for a workstation.

The public names, in the order of the path: live model -> capture -> repo -> entry -> verdict.
Each is imported when it is first used, so that `import modulelens` stays free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulelens import errors
    from modulelens.capture import Capture, Keep, end_traces, track_init
    from modulelens.entry import Entry
    from modulelens.measure.flops import register_formula
    from modulelens.records import Check, Comparison, Grade, Measurement, Profile, Status
    from modulelens.repo import Repo
    from modulelens.session import Trace, trace

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

_HOMES = {
    "capture": ("track_init", "end_traces", "Keep", "Capture"),
    "session": ("trace", "Trace"),
    "repo": ("Repo",),
    "entry": ("Entry",),
    "records": ("Check", "Status", "Grade", "Measurement", "Comparison", "Profile"),
    "measure.flops": ("register_formula",),
    "errors": ("errors",),  # the module itself
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'modulelens' has no attribute {name!r}")
    module = importlib.import_module(f"modulelens.{home}")
    globals()[name] = found = module if name == home else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
