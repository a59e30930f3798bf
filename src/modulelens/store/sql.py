"""A filter as a condition on the index's tables. What it means is defined in query.py."""

from __future__ import annotations

from typing import Any

from modulelens.store.facts import FIELDS, Kind
from modulelens.store.query import All, AnyOf, Compare, Filter, Node, Not, parse

#: Texts with a value of their own in nearly every row; all other texts and lists are kept once,
#: in `items`, and a row holds their number.
PLAIN = {"id": "collection || '/' || version", "name": "name", "date": "date"}

_SIGNS = {"$eq": "=", "$lt": "<", "$le": "<=", "$gt": ">", "$ge": ">="}


def compile(filter: Filter) -> tuple[str, list[Any]]:
    """An SQL condition on the table `entries`, and its parameters.

    Raises:
        UsageError: The filter cannot be used.
    """
    params: list[Any] = []
    return _sql(parse(filter), params), params


def _sql(node: Node, params: list[Any]) -> str:
    if isinstance(node, All | AnyOf):
        word, empty = (" AND ", "1") if isinstance(node, All) else (" OR ", "0")
        return (
            f"({word.join([_sql(part, params) for part in node.parts])})" if node.parts else empty
        )
    if isinstance(node, Not):
        # NULL means false here; only a negation can tell them apart.
        return f"NOT COALESCE({_sql(node.part, params)}, 0)"
    return _compare(node, params)


def _compare(node: Compare, params: list[Any]) -> str:
    column = PLAIN.get(node.field, node.field)
    if node.op == "$exists":
        return f"({column} IS {'NOT ' if node.value else ''}NULL)"
    if node.op == "$eq" and node.value is None:
        return f"({column} IS NULL)"
    if node.op == "$in" and None in node.value:
        present = Compare(node.field, "$in", tuple(v for v in node.value if v is not None))
        return f"({column} IS NULL OR {_compare(present, params)})"
    if node.field in PLAIN or FIELDS[node.field] is Kind.NUMBER:
        return f"({_test(column, node, params)})"
    params.append(node.field)
    test = _test("value", node, params)
    return f"({column} IN (SELECT word FROM items WHERE field = ? AND {test}))"


def _test(what: str, node: Compare, params: list[Any]) -> str:
    if node.op == "$in":
        params.extend(_bindable(value) for value in node.value)
        return f"{what} IN ({', '.join('?' * len(node.value))})"
    params.append(_bindable(node.value))
    if node.op == "$regex":
        return f"{what} REGEXP ?"
    if node.op == "$contains" and FIELDS[node.field] is Kind.TEXT:
        return f"instr({what}, ?) > 0"
    return f"{what} {_SIGNS.get(node.op, '=')} ?"


def _bindable(value: Any) -> Any:
    # Beyond 64 bits only the order against every stored number matters.
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float("inf") if value > 0 else float("-inf")
    return value
