"""How the server writes ids, times and pages, and how it chooses and orders what a page shows."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.wandb_server.executor import Refused
from tests.wandb_server.filters import in_order, loaded, matches


def identifier(kind: str, number: int) -> str:
    return base64.b64encode(f"{kind}:{number}".encode()).decode()


def stamp(seconds: float) -> str:
    """A point in time as the server writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def connection(items: Sequence[Any], first: int | None, after: str | None) -> dict[str, Any]:
    """One page, relay style; a cursor is the decimal offset and opaque to the client."""
    start = int(after or 0)
    page = items[start : start + (50 if first is None else first)]
    end = start + len(page)
    return {
        "__typename": "Connection",
        "totalCount": len(items),
        "pageInfo": {
            "__typename": "PageInfo",
            "endCursor": str(end) if page else None,
            "hasNextPage": end < len(items),
        },
        "edges": [
            {
                "__typename": "Edge",
                "node": item,
                "cursor": str(start + place + 1),
                "version": f"v{getattr(item, 'versionIndex', 0)}",
            }
            for place, item in enumerate(page)
        ],
    }


def chosen(
    items: Sequence[Any], filters: str | None, order: str | None, look: Callable[..., list[Any]]
) -> list[Any]:
    """The items that fulfil a filter, in order; `look(item, field)` gives a field's values."""
    condition = loaded(filters)
    found = [item for item in items if matches(condition, partial(look, item))]
    in_order(found, order, look)
    return found


def see(item: Any, name: str) -> list[Any]:
    """An item's values under the name of a filter field."""
    return item._see(name)


def no_field(kind: str, name: str) -> Refused:
    return Refused(f"unknown filter field of a {kind}: {name}")


def tag_nodes(tags: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"__typename": "Tag", "id": base64.b64encode(f"Tag:{t}".encode()).decode(), "name": t}
        for t in tags
    ]
