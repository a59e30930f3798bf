"""Enums whose members are words: they print, compare and serialise as their text."""

from __future__ import annotations

import enum


class Word(str, enum.Enum):
    """What `enum.StrEnum` is from Python 3.11 on."""

    def __str__(self) -> str:
        return str(self.value)
