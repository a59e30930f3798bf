"""Rows and filters in SQL. Knows no file, lock or connection of its own.

Texts and lists are kept once, in `words`, and a row holds their numbers: rows stay narrow, and a
filter is tried on each different value (in `items`) instead of on each row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

import msgspec

from modulelens.store.facts import FIELDS, Kind, Row, natural, searched
from modulelens.store.query import Compare, Filter, Group, Node, Not, parse

#: Any change to the tables or to what a row holds needs a new number; old files are rebuilt.
VERSION = 2

#: Texts with a value of their own in nearly every row; all other texts and lists are kept once,
#: in `items`, and a row holds their number.
PLAIN = {"id": "collection || '/' || version", "name": "name", "date": "date"}


_SIGNS = {"$eq": "=", "$lt": "<", "$le": "<=", "$gt": ">", "$ge": ">="}
_COLUMNS = [field for field in FIELDS if field not in PLAIN]
_WORDS = frozenset(field for field in _COLUMNS if FIELDS[field] is not Kind.NUMBER)
_WRITE = ["collection", "sort", "name", "date", *_COLUMNS]
# Rows lie in the order in which they are shown: a search is one walk that stops at its limit.
# No column has a type but the texts, so that numbers compare as they were given.
TABLES = (
    f"CREATE TABLE entries (sort TEXT, collection TEXT, {', '.join(_COLUMNS)},"
    " name TEXT, date TEXT, PRIMARY KEY (sort, collection, version DESC)) WITHOUT ROWID",
    "CREATE UNIQUE INDEX by_version ON entries (collection, version)",
    "CREATE TABLE words (word INTEGER PRIMARY KEY, field TEXT, json TEXT, UNIQUE (field, json))",
    "CREATE TABLE items (field TEXT, value TEXT, word INTEGER,"
    " PRIMARY KEY (field, value, word)) WITHOUT ROWID",
    f"PRAGMA user_version = {VERSION}",
)
_READ = ", ".join(PLAIN.get(field, field) for field in FIELDS)
_UPSERT = (
    f"INSERT INTO entries ({', '.join(_WRITE)}) VALUES ({', '.join('?' * len(_WRITE))})"
    " ON CONFLICT (collection, version) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in _WRITE)
)
_AT = [number for number, field in enumerate(FIELDS) if field in _WORDS]
_EMPTY = [() if kind is Kind.LIST else None for kind in FIELDS.values()]


class Words:
    """Numbers of texts and lists that one connection has seen; none is ever taken back."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.numbers: dict[tuple[str, Any], int] = {}

    def clear(self) -> None:
        """Forgets all: after a rollback some may not exist."""
        self.values.clear()
        self.numbers.clear()


def select(where: str) -> str:
    """The statement that `read_rows` runs; its last parameters are the limit and the offset."""
    order = "ORDER BY sort, collection, version DESC LIMIT ? OFFSET ?"
    return f"SELECT {_READ} FROM entries WHERE {where} {order}"


def read_rows(db: sqlite3.Connection, words: Words, sql: str, params: list[Any]) -> list[Row]:
    """The rows that a `select` finds."""
    found = db.execute(sql, params).fetchall()
    for word in {line[number] for line in found for number in _AT} - words.values.keys() - {None}:
        line = db.execute("SELECT json FROM words WHERE word = ?", (word,)).fetchone()
        value = msgspec.json.decode(line[0]) if line and isinstance(line[0], str) else line
        words.values[word] = tuple(value) if isinstance(value, list) else value
    rows = []
    for line in found:
        values = list(line)
        for number in _AT:
            values[number] = words.values.get(line[number], _EMPTY[number])
        rows.append(msgspec.convert(dict(zip(FIELDS, values, strict=True)), Row))
    return rows


def is_ours(db: sqlite3.Connection) -> bool:
    """Whether it has exactly our tables: what else lies in a file would run with them."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    made = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return version == VERSION and {sql for (sql,) in made} == set(TABLES[:-1])


def put_row(db: sqlite3.Connection, words: Words, collection: str, row: Row) -> None:
    """Writes a row in place of an older one of the same version."""
    values: list[Any] = [collection, natural(row.name), row.name, row.date]
    for field in _COLUMNS:
        value = getattr(row, field)
        if field in _WORDS:
            key = (field, value)
            if value is not None and value != () and key not in words.numbers:
                words.numbers[key] = _number(db, field, value)
            value = words.numbers.get(key)
        values.append(value)
    db.execute(_UPSERT, values)


def keep_rows(
    db: sqlite3.Connection, collection: str, kept: Iterable[int], of: Iterable[int] | None
) -> None:
    """Removes the rows of a collection, or of some versions of it, except those to keep."""
    if of is None:
        sql = "SELECT version FROM entries WHERE collection = ?"
        of = [version for (version,) in db.execute(sql, (collection,))]
    gone = [(collection, version) for version in set(of).difference(kept)]
    db.executemany("DELETE FROM entries WHERE collection = ? AND version = ?", gone)


def _number(db: sqlite3.Connection, field: str, value: str | tuple[str, ...]) -> int:
    key = (field, msgspec.json.encode(value).decode())
    found = db.execute("SELECT word FROM words WHERE field = ? AND json = ?", key).fetchone()
    if found:
        return int(found[0])
    word = db.execute("INSERT INTO words (field, json) VALUES (?, ?)", key).lastrowid
    assert word is not None
    items = [(field, item, word) for item in searched(field, value)]
    db.executemany("INSERT OR IGNORE INTO items VALUES (?, ?, ?)", items)
    return word


def compile(filter: Filter) -> tuple[str, list[Any]]:
    """An SQL condition on the table `entries`, and its parameters.

    Raises:
        UsageError: The filter cannot be used.
    """
    params: list[Any] = []
    return _sql(parse(filter), params), params


def _sql(node: Node, params: list[Any]) -> str:
    if isinstance(node, Group):
        parts = [_sql(part, params) for part in node.parts] or [str(int(not node.some))]
        return f"({(' OR ' if node.some else ' AND ').join(parts)})"
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
