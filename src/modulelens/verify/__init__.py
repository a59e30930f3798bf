"""Verdicts on an entry: does a rebuilt or edited module do what was captured?"""

from modulelens.verify.check import check, drift_warnings
from modulelens.verify.grade import grade, grade_init, grade_structure
from modulelens.verify.trial import bind
from modulelens.verify.varied import FIXED, varied

__all__ = [
    "FIXED",
    "bind",
    "check",
    "drift_warnings",
    "grade",
    "grade_init",
    "grade_structure",
    "varied",
]
