"""Stands for a module above the rebuilt one, to which it holds a reference."""

from __future__ import annotations

from typing import Any

from modulelens.errors import NotRebuildable


class Ancestor:
    """Has the ancestor's plain scalars; anything else of it raises and names it."""

    def __init__(self, fqn: str, cls: str, scalars: dict[str, Any]) -> None:
        self.__dict__.update(scalars)
        self.__dict__["_ancestor"] = (fqn, cls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fqn, cls = self.__dict__["_ancestor"]
        raise NotRebuildable(
            f"it needs .{name} of its ancestor {fqn or '(root)'} ({cls})",
            reason="ancestor",
            hint=f"check the entry of {fqn or 'the root'} instead",
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises, naming the ancestor."""
        return self.forward
