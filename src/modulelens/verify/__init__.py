"""Verdicts on an entry: does a rebuilt or edited module do what was captured?"""

from modulelens.measure.untouched import untouched
from modulelens.verify.check import check, drift_warnings
from modulelens.verify.grade import grade, grade_init, grade_structure
from modulelens.verify.subject import Subject, subject_of
from modulelens.verify.varied import FIXED, varied

__all__ = [
    "FIXED",
    "Subject",
    "check",
    "drift_warnings",
    "grade",
    "grade_init",
    "grade_structure",
    "subject_of",
    "varied",
]

untouched.keep()  # all that verdicts are formed with is loaded, and nothing that is judged
