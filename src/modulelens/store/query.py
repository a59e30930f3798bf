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


class All(msgspec.Struct, frozen=True):
    """True when every part is; without parts too."""

    parts: tuple[Node, ...]


class AnyOf(msgspec.Struct, frozen=True):
    """True when some part is; never without parts."""

    parts: tuple[Node, ...]


class Not(msgspec.Struct, frozen=True):
    """The opposite of `part`."""

    part: Node


Node = Compare | All | AnyOf | Not

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "$lt": operator.lt,
    "$le": operator.le,
    "$gt": operator.gt,
    "$ge": operator.ge,
}
_SPELLINGS = {"$lte": "$le", "$gte": "$ge"}
_OPERATORS = ("$eq", "$ne", *_ORDER, *_SPELLINGS, "$in", "$contains", "$regex", "$exists", "$not")
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
            parts.append(All(group) if key == "$and" else AnyOf(group))
        elif key == "$not":
            parts.append(Not(parse(value, depth + 1)))
        else:
            parts.append(_condition(_field(key), value, depth + 1))
    node = parts[0] if len(parts) == 1 else All(tuple(parts))
    if depth == 0 and _size(node) > _MAX_PARTS:
        raise UsageError(f"the filter has over {_MAX_PARTS} parts")
    return node


def _size(node: Node) -> int:
    if isinstance(node, All | AnyOf):
        return 1 + sum(_size(part) for part in node.parts)
    return 1 + _size(node.part) if isinstance(node, Not) else 1


def matches(row: Row, filter: Filter) -> bool:
    """Whether the filter selects the row. This defines the language.

    Raises:
        UsageError: The filter cannot be used.
    """
    return _holds(parse(filter), row)


def _holds(node: Node, row: Row) -> bool:
    if isinstance(node, All):
        return all(_holds(part, row) for part in node.parts)
    if isinstance(node, AnyOf):
        return any(_holds(part, row) for part in node.parts)
    if isinstance(node, Not):
        return not _holds(node.part, row)
    return _satisfies(searched(node.field, getattr(row, node.field)), node)


def _satisfies(values: Sequence[Any], condition: Compare) -> bool:
    op, wanted = condition.op, condition.value
    if op == "$exists":
        return bool(values) is wanted
    if op == "$eq":
        return not values if wanted is None else wanted in values
    if op == "$in":
        return any(value in wanted for value in values) or (None in wanted and not values)
    if op == "$contains":
        if FIELDS[condition.field] is Kind.LIST:
            return wanted in values
        return any(wanted in value for value in values)
    if op == "$regex":
        return any(re.search(wanted, value) is not None for value in values)
    return any(_ORDER[op](value, wanted) for value in values)


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
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _operand(field: str, op: str, value: object) -> object:
    if op == "$exists":
        if not isinstance(value, bool):
            raise UsageError(f"{spelled(field)}: $exists takes true or false, not {value!r:.100}")
        return value
    if op == "$in":
        if not isinstance(value, list | tuple | set | frozenset) or len(value) > _MAX_PARTS:
            raise UsageError(f"{spelled(field)}: $in takes a list of up to {_MAX_PARTS} values")
        return tuple(_operand(field, "$eq", part) for part in value)
    if op == "$eq" and value is None:
        return None
    number = FIELDS[field] is Kind.NUMBER
    if number and op in ("$contains", "$regex"):
        raise UsageError(f"{spelled(field)} is a number; {op} is for texts and lists")
    if number and not _is_number(value):
        raise UsageError(f"{spelled(field)} compares with a number, not {value!r:.100}")
    if not number and not _is_text(value):
        raise UsageError(f"{spelled(field)} compares with a text, not {value!r:.100}")
    if op == "$regex":
        _check_regex(field, str(value))
    return value


def _check_regex(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{spelled(field)}: {pattern!r:.100} is no regex: {error}") from error


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or not math.isnan(value)


def _is_text(value: object) -> bool:
    # Half a surrogate pair can be stored nowhere, so nothing compares with it.
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _unknown(what: str, name: object, known: Iterable[str]) -> UsageError:
    from difflib import get_close_matches

    close = get_close_matches(str(name), known, n=3)
    return UsageError(
        f"unknown {what} {name!r:.100}",
        hint=f"one of: {' '.join(known)}",
        did_you_mean=close,
    )


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
