"""The filter language: Mongo-style dicts, what they mean, and the CLI's terms. Knows no SQL.

A field is a number, a text or a list of texts. A list satisfies an operator when any of its
elements does; `cls` counts as the full path and the bare class name. A missing value (None, an
empty list) satisfies only `$exists: false`, `$eq: null` and negations.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from modulelens.errors import UsageError
from modulelens.store.facts import FIELDS, Kind, Row, searched

Filter = Mapping[str, Any]


class Compare(msgspec.Struct, frozen=True):
    """One checked condition. `op` is `$eq $lt $le $gt $ge $in $contains $regex` or `$exists`."""

    field: str
    op: str
    value: Any


class Group(msgspec.Struct, frozen=True):
    """True when every part is, or with `some` when some part is."""

    parts: tuple[Node, ...]
    some: bool = False


class Not(msgspec.Struct, frozen=True):
    """The opposite of `part`."""

    part: Node


Node = Compare | Group | Not

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": operator.eq,
    "$lt": operator.lt,
    "$le": operator.le,
    "$gt": operator.gt,
    "$ge": operator.ge,
    "$contains": operator.contains,
    "$regex": lambda value, pattern: re.search(pattern, value) is not None,
}
_SPELLINGS = {"$lte": "$le", "$gte": "$ge"}
_OPERATORS = (*_COMPARE, *_SPELLINGS, "$ne", "$in", "$exists", "$not")
#: Also keeps the SQL far below SQLite's limit of 1,000 nested expressions.
_MAX_DEPTH, _MAX_PARTS = 30, 500


def parse(filter: Filter, depth: int = 0) -> Node:
    """A filter, checked.

    Raises:
        UsageError: An unknown field or operator, or a value that does not fit its field.
    """
    if not isinstance(filter, Mapping):
        raise UsageError(f"a filter is a dict, not {filter!r:.100}")
    if depth > _MAX_DEPTH:
        raise UsageError(f"the filter has over {_MAX_DEPTH} levels")
    parts: list[Node] = []
    for key, value in filter.items():
        if key in ("$and", "$or"):
            if not isinstance(value, list | tuple):
                raise UsageError(f"{key} takes a list of filters, not {value!r:.100}")
            group = tuple(parse(part, depth + 1) for part in value)
            parts.append(Group(group, some=key == "$or"))
        elif key == "$not":
            parts.append(Not(parse(value, depth + 1)))
        else:
            parts.append(_condition(_field(key), value, depth + 1))
    node = parts[0] if len(parts) == 1 else Group(tuple(parts))
    if depth == 0 and _size(node) > _MAX_PARTS:
        raise UsageError(f"the filter has over {_MAX_PARTS} parts")
    return node


def _size(node: Node) -> int:
    parts = node.parts if isinstance(node, Group) else (node.part,) if isinstance(node, Not) else ()
    return 1 + sum(_size(part) for part in parts)


def matches(row: Row, filter: Filter) -> bool:
    """Whether the filter selects the row. This defines the language.

    Raises:
        UsageError: The filter cannot be used.
    """
    return _holds(parse(filter), row)


def _holds(node: Node, row: Row) -> bool:
    if isinstance(node, Group):
        return (any if node.some else all)(_holds(part, row) for part in node.parts)
    if isinstance(node, Not):
        return not _holds(node.part, row)
    values = searched(node.field, getattr(row, node.field))
    if node.op == "$exists":
        return bool(values) is node.value
    wanted = node.value if node.op == "$in" else (node.value,)
    if not values:
        return node.op in ("$eq", "$in") and None in wanted
    is_list = FIELDS[node.field] is Kind.LIST
    test = _COMPARE["$eq" if node.op == "$in" or (node.op == "$contains" and is_list) else node.op]
    return any(test(value, part) for value in values for part in wanted)


def _field(name: object) -> str:
    field = name.replace(".", "_") if isinstance(name, str) else ""
    if field in FIELDS:
        return field
    if isinstance(name, str) and name.startswith("$"):
        raise _unknown("operator", name, ("$and", "$or", "$not"))
    raise _unknown("field", name, [spelled(field) for field in FIELDS])


def spelled(field: str) -> str:
    """How people write a field: `input.dtype`."""
    return re.sub("^(input|output)_", r"\1.", field)


def _condition(field: str, value: object, depth: int) -> Node:
    if not isinstance(value, Mapping):
        return Compare(field, "$eq", _operand(field, "$eq", value))
    if not value or depth > _MAX_DEPTH:
        raise UsageError(f"{spelled(field)}: {value!r:.100} holds no operator, or too many levels")
    parts: list[Node] = []
    for key, operand in value.items():
        if key not in _OPERATORS:
            raise _unknown("operator", key, _OPERATORS)
        op = str(_SPELLINGS.get(key, key))
        if op == "$not":
            parts.append(Not(_condition(field, operand, depth + 1)))
        elif op == "$ne":
            parts.append(Not(Compare(field, "$eq", _operand(field, "$eq", operand))))
        else:
            parts.append(Compare(field, op, _operand(field, op, operand)))
    return parts[0] if len(parts) == 1 else Group(tuple(parts))


def _operand(field: str, op: str, value: object) -> object:
    number = FIELDS[field] is Kind.NUMBER
    if op == "$in":
        if isinstance(value, list | tuple | set | frozenset) and len(value) <= _MAX_PARTS:
            return tuple(_operand(field, "$eq", part) for part in value)
        wants = f"a list of up to {_MAX_PARTS} values"
    elif op == "$exists":
        if isinstance(value, bool):
            return value
        wants = "true or false"
    elif number and op in ("$contains", "$regex"):
        wants = "texts and lists, and this is a number"
    elif (value is None and op == "$eq") or (_is_number(value) if number else _is_text(value)):
        return _regex(field, value) if op == "$regex" else value
    else:
        wants = "a number" if number else "a text"
    raise UsageError(f"{spelled(field)}: {op} takes {wants}, not {value!r:.100}")


def _regex(field: str, pattern: Any) -> str:
    try:
        return str(re.compile(pattern).pattern)
    except re.error as error:
        raise UsageError(f"{spelled(field)}: {pattern!r:.100} is no regex: {error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_text(value: object) -> bool:
    # Half a surrogate pair can be stored nowhere, so nothing compares with it.
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _unknown(what: str, name: object, known: Iterable[str]) -> UsageError:
    from difflib import get_close_matches

    close = get_close_matches(str(name), known, n=3)
    hint = f"one of: {' '.join(known)}"
    return UsageError(f"unknown {what} {name!r:.100}", hint=hint, did_you_mean=close)


_TERM = re.compile(r"\s*([A-Za-z_.]+)\s*(>=|<=|!=|==|=|>|<|~|:)\s*(.*?)\s*", re.DOTALL)
_SIGNS = {
    ">=": "$ge",
    "<=": "$le",
    "!=": "$ne",
    "==": "$eq",
    "=": "$eq",
    ">": "$gt",
    "<": "$lt",
    "~": "$regex",
    ":": "$contains",
}


def parse_terms(terms: Sequence[str]) -> dict[str, Any]:
    """The filter that all of the CLI's terms (`params>1e6`, `cls~Attn.*`, `tags:base`) make.

    Raises:
        UsageError: A term is not `field sign value`, or its value does not fit.
    """
    parts = [_parse_term(term) for term in terms]
    filter = parts[0] if len(parts) == 1 else {"$and": parts} if parts else {}
    parse(filter)
    return filter


def _parse_term(term: str) -> dict[str, Any]:
    found = _TERM.fullmatch(term)
    if found is None:
        raise UsageError(
            f"{term!r:.100} is not a term",
            hint="field, sign, value, such as 'params>1e6'; signs: " + " ".join(_SIGNS),
        )
    name, sign, text = found.groups()
    field = _field(name)
    if FIELDS[field] is not Kind.NUMBER:
        return {spelled(field): {_SIGNS[sign]: text}}
    try:
        number = float(text)
    except ValueError as error:
        raise UsageError(f"{term!r:.100}: {text!r:.100} is no number") from error
    whole = math.isfinite(number) and number == int(number)
    return {spelled(field): {_SIGNS[sign]: int(number) if whole else number}}
