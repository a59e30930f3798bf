"""An entry's tags and aliases as one set: what changed since is a difference. No network."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

#: Pairs of "tag" or "alias", and the text.
Names = frozenset[tuple[str, str]]


def names_of(tags: Iterable[str], aliases: Iterable[str]) -> Names:
    """All of them."""
    return frozenset([*(("tag", tag) for tag in tags), *(("alias", alias) for alias in aliases)])


def texts(kind: str, names: Names) -> list[str]:
    """Those of one kind, in order."""
    return sorted(text for found, text in names if found == kind)


def dump(names: Names) -> str:
    """As text, which `load` reads."""
    return msgspec.json.encode(sorted(names)).decode(errors="surrogatepass")


def load(text: str) -> Names:
    """What `dump` was given."""
    return frozenset(msgspec.json.decode(text, type=list[tuple[str, str]]))
