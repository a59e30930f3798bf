"""What became of each module that a trace was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex, overload

import msgspec

from modulelens.records.word import Word


class Fate(Word):
    """The fate of one requested module."""

    RECORDED = "recorded"
    NOT_CALLED = "not called"
    BYPASSED = "bypassed"
    REFUSED = "refused"


class Coverage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fate of one requested module, and why; `dropped_bytes` did not fit a `Keep` limit.

    `table_rows`: of these embedding tables so many rows were kept, of so many: those looked up.
    """

    fqn: str
    cls: str
    fate: Fate
    reason: str = ""
    calls: int = 0
    dropped_calls: int = 0
    recomputes: int = 0
    dropped_bytes: int = 0
    table_rows: dict[str, tuple[int, int]] = {}

    def __str__(self) -> str:
        return f"{self.fate}: {self.reason}" if self.reason else str(self.fate)


class CoverageList(list[Coverage]):
    """The fates in the order of the modules; `coverage["layers.3"]` gives that of one fqn."""

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> Coverage: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[Coverage]: ...
    @overload
    def __getitem__(self, key: str, /) -> Coverage: ...
    def __getitem__(self, key: SupportsIndex | slice | str, /) -> Coverage | list[Coverage]:
        """By place, or by fqn.

        Raises:
            KeyError: No module of that fqn was asked for.
        """
        if not isinstance(key, str):
            return super().__getitem__(key)
        found = next((coverage for coverage in self if coverage.fqn == key), None)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return any(key in (coverage, coverage.fqn) for coverage in self)

    def keys(self) -> list[str]:
        """The fqns."""
        return [coverage.fqn for coverage in self]

    def items(self) -> Iterator[tuple[str, Coverage]]:
        """Pairs of fqn and fate."""
        return ((coverage.fqn, coverage) for coverage in self)
