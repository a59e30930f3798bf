"""The zoo: every file of architectures, and what their libraries are called."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from tests.models.zoo.architecture import Architecture

FILES = {
    "plain": "torch",
    "unet": "torch",
    "decoders": "transformers",
    "experts": "transformers",
    "state_space": "transformers",
    "encoders": "transformers",
    "sequences": "transformers",
    "vision": "transformers",
    "audio": "transformers",
    "multimodal": "transformers",
    "series": "transformers",
    "recommendation": "torchrec",
    "graphs": "torch_geometric",
}


def zoo() -> tuple[list[Architecture], dict[str, str]]:
    """All architectures whose library is installed; file -> why its own are left out."""
    found: list[Architecture] = []
    missing: dict[str, str] = {}
    for file, library in FILES.items():
        try:
            importlib.import_module(library)
        except (ImportError, OSError) as error:
            missing[file] = f"{library} cannot be imported: {error}"
            continue
        found += importlib.import_module(f"tests.models.zoo.{file}").ARCHITECTURES
    return found, missing


def named(names: Iterable[str], architectures: Iterable[Architecture]) -> list[Architecture]:
    """Those of these names, in that order.

    Raises:
        KeyError: A name is not in the zoo.
    """
    by_name = {one.name: one for one in architectures}
    return [by_name[name] for name in names]
