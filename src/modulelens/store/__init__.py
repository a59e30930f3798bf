"""Records and tensors <-> disk. Importing it imports neither torch nor sqlite3."""

from modulelens.store.facts import Row
from modulelens.store.local import LocalStore
from modulelens.store.query import Filter, matches, parse_terms
from modulelens.store.upkeep import FsckReport, GcReport, Problem

__all__ = [
    "Filter",
    "FsckReport",
    "GcReport",
    "LocalStore",
    "Problem",
    "Row",
    "matches",
    "parse_terms",
]
