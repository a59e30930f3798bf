"""The filter language of the registry search, as far as the SDK's own validator names it.

A filter is MongoDB-like JSON; a field has several values where it is a set (tags, aliases) or a
list. How the real server treats regex dialects, dots in keys or numbers in strings isn't public.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tests.wandb_server.executor import Refused

Lookup = Callable[[str], list[Any]]
ORDERINGS = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}


def loaded(text: str | None) -> dict[str, Any]:
    """A filter as it travels: a JSON string, or null for all."""
    value = json.loads(text) if text else {}
    if not isinstance(value, dict):
        raise Refused(f"filters must be a JSON object, not {text}")
    return value


def matches(condition: dict[str, Any], lookup: Lookup) -> bool:
    """Whether one item, seen through `lookup` (field name -> its values), fulfils a filter."""
    return all(clause(key, operand, lookup) for key, operand in condition.items())


def clause(key: str, operand: Any, lookup: Lookup) -> bool:
    match key:
        case "$and":
            return all(matches(each, lookup) for each in operand)
        case "$or":
            return any(matches(each, lookup) for each in operand)
        case "$nor":
            return not any(matches(each, lookup) for each in operand)
        case "$not":
            return not matches(operand, lookup)
    if key.startswith("$"):
        raise Refused(f"unknown filter operator: {key}")
    return holds(operand, lookup(key))


def holds(operand: Any, values: list[Any]) -> bool:
    """Whether a field's values fulfil what is asked of the field."""
    if not (isinstance(operand, dict) and any(key.startswith("$") for key in operand)):
        return equal_any(operand, values)
    return all(applied(name, value, values) for name, value in operand.items())


def applied(name: str, operand: Any, values: list[Any]) -> bool:
    if name in ORDERINGS:
        return any(ordered(ORDERINGS[name], value, operand) for value in values)
    if name in SINGLE:
        return SINGLE[name](operand, values)
    raise Refused(f"unknown filter operator: {name}")


def equal_any(operand: Any, values: list[Any]) -> bool:
    return any(same(operand, value) for value in values or [None])


def same(left: Any, right: Any) -> bool:
    """JSON equality: true is not 1."""
    return isinstance(left, bool) is isinstance(right, bool) and left == right


def ordered(compare: Callable[[Any, Any], bool], value: Any, operand: Any) -> bool:
    """An ordering of two numbers or two strings; of anything else there is none."""
    if isinstance(value, bool) or isinstance(operand, bool):
        return False
    numbers = isinstance(value, (int, float)) and isinstance(operand, (int, float))
    if numbers or (isinstance(value, str) and isinstance(operand, str)):
        return compare(value, operand)
    return False


def contained(operand: Any, values: list[Any]) -> bool:
    return any(
        operand in value if isinstance(value, str) else same(operand, value)
        for value in values
        if isinstance(operand, str)
    )


SINGLE: dict[str, Callable[[Any, list[Any]], bool]] = {
    "$eq": equal_any,
    "$ne": lambda operand, values: not equal_any(operand, values),
    "$in": lambda operand, values: any(equal_any(each, values) for each in operand),
    "$nin": lambda operand, values: not any(equal_any(each, values) for each in operand),
    "$exists": lambda operand, values: bool(values) is bool(operand),
    "$regex": lambda operand, values: any(
        re.search(operand, value) is not None for value in values if isinstance(value, str)
    ),
    "$contains": contained,
    "$not": lambda operand, values: not holds(operand, values),
    "$all": lambda operand, values: all(equal_any(each, values) for each in operand),
    "$size": lambda operand, values: any(
        len(value) == operand for value in values if isinstance(value, list)
    ),
}


@lru_cache(maxsize=8192)
def metadata(text: str) -> Any:
    return json.loads(text)


def in_metadata(text: str | None, path: list[str]) -> list[Any]:
    """The values at a dotted path of JSON metadata; a key may itself hold dots."""
    return at_path(metadata(text) if text else {}, path)


def at_path(value: Any, path: list[str]) -> list[Any]:
    if not path:
        return [value, *value] if isinstance(value, list) else [value]
    if isinstance(value, list):
        return [found for item in value for found in at_path(item, path)]
    if not isinstance(value, dict):
        return []
    return [
        found
        for end in range(1, len(path) + 1)
        if (key := ".".join(path[:end])) in value
        for found in at_path(value[key], path[end:])
    ]


def in_order(items: list[Any], order: str | None, look: Callable[[Any, str], list[Any]]) -> None:
    """Sorts in place by `field`, `+field` or `-field`; without an order, newest first."""
    if order is None:
        items.reverse()
        return
    field = order.lstrip("+-")
    items.sort(key=lambda item: (look(item, field) or [""])[0], reverse=order.startswith("-"))
