"""Records and tensors <-> disk. Importing it imports neither torch nor sqlite3."""

from modulelens.store.facts import Row
from modulelens.store.fsck import FsckReport, Problem
from modulelens.store.gc import GcReport
from modulelens.store.local import LocalStore
from modulelens.store.query import Filter, matches, parse_terms
from modulelens.store.sql import compile

__all__ = [
    "Filter",
    "FsckReport",
    "GcReport",
    "LocalStore",
    "Problem",
    "Row",
    "compile",
    "matches",
    "parse_terms",
]
