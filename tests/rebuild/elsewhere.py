"""What tests run in another process. Takes and gives plain JSON values."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import msgspec

import modulelens as ml


def check(*, repo: str, ref: str, path: str = "", **options: Any) -> Any:
    """The verdict on an entry, with `path` importable."""
    sys.path.insert(0, path) if path else None
    return msgspec.to_builtins(ml.Repo(repo)[ref].check(**options))


def rebuild(
    *, repo: str, ref: str, path: str = "", class_map: dict[str, str] | None = None
) -> dict[str, Any]:
    """Class, state and output of the rebuilt module; `class_map` values are `module:name`."""
    sys.path.insert(0, path) if path else None
    entry = ml.Repo(repo)[ref]
    found = {old: _object(new) for old, new in (class_map or {}).items()}
    module = entry.rebuild(class_map=found)
    args, kwargs = entry.inputs()
    out = module(*args, **kwargs)
    cls = type(module)
    return {
        "cls": f"{cls.__module__}:{cls.__qualname__}",
        "state": {name: t.tolist() for name, t in module.state_dict().items()},
        "output": out.tolist(),
        "devices": sorted({str(p.device) for p in module.parameters()}),
    }


def warnings_of_rebuild(*, repo: str, ref: str, path: str = "") -> list[str]:
    """What rebuilding warns of, with `path` importable."""
    sys.path.insert(0, path) if path else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ml.Repo(repo)[ref].rebuild()
    return [str(w.message) for w in caught]


def loaded_modules(*, repo: str, ref: str) -> list[str]:
    """What reading a record imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ = ml.Repo(repo)[ref].metadata
    return sorted(sys.modules)


def _object(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
