"""What became of each module that a trace was asked for."""

from __future__ import annotations

import enum

import msgspec


class Fate(str, enum.Enum):
    """The fate of one requested module."""

    RECORDED = "recorded"
    NOT_CALLED = "not called"
    BYPASSED = "bypassed"
    REFUSED = "refused"


class Coverage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fate of one requested module, and why."""

    fqn: str
    cls: str
    fate: Fate
    reason: str = ""
    calls: int = 0
    dropped_calls: int = 0
    recomputes: int = 0
