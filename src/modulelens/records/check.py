"""The verdict of a comparison, and the grade that verification gives an entry."""

from __future__ import annotations

import msgspec
from msgspec.structs import astuple

from modulelens.records.word import Word


class Status(Word):
    """Outcome of comparing a run with what was captured, from best to worst."""

    EXACT = "EXACT"
    CLOSE = "CLOSE"
    NOT_COMPARABLE = "NOT_COMPARABLE"
    MISMATCH_VALUE = "MISMATCH_VALUE"
    MISMATCH_DTYPE = "MISMATCH_DTYPE"
    MISMATCH_SHAPE = "MISMATCH_SHAPE"
    MISMATCH_STRUCTURE = "MISMATCH_STRUCTURE"
    TIMEOUT = "TIMEOUT"
    RUNTIME_ERROR = "RUNTIME_ERROR"

    @property
    def passed(self) -> bool:
        """Whether the run reproduces what was captured."""
        return self in (Status.EXACT, Status.CLOSE)


class Reason(Word):
    """Why an entry cannot be rebuilt, or one of its aspects is not exact."""

    NOT_IMPORTABLE = "not_importable"
    OPAQUE_ARGUMENT = "opaque_argument"
    OPAQUE_ATTRIBUTE = "opaque_attribute"
    OPAQUE_OUTPUT = "opaque_output"
    SCRIPT = "script"
    UNINITIALIZED = "uninitialized"
    FOREIGN_HOOK = "foreign_hook"
    ANCESTOR = "ancestor"
    OUTSIDE_ENTROPY = "outside_entropy"
    GRADIENT_SIDE_CHANNEL = "gradient_side_channel"
    OUTPUT_MODIFIED_BY_CALLER = "output_modified_by_caller"
    TENSOR_SUBCLASS = "tensor_subclass"
    UNTRUSTED_CLASS = "untrusted_class"
    SHAPE_ONLY = "shape_only"
    NOT_KEPT = "not_kept"
    SHARED_PARAMETER = "shared_parameter"
    SHARED_INPUT = "shared_input"
    SHARDED = "sharded"
    MISMATCH = "mismatch"
    RUNTIME_ERROR = "runtime_error"
    CRASHED = "crashed"
    TIMEOUT = "timeout"


class LeafCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The comparison of one leaf.

    `path` reads like code (`output["logits"]`, `buffers["running_mean"]`, `grad["weight"]`).
    `max_abs` and `max_rel` are over finite elements; `error_ratio` is the error against a float64
    reference divided by the original's own error, where that rule was applied.
    """

    path: str
    status: Status
    message: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    error_ratio: float | None = None
    mismatched: int = 0
    numel: int = 0


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict of one run against what was captured; `status` is the worst of `leaves`.

    `printed` is the end of what the code printed, where it ran in a process of its own. In an edit
    loop `changed` are the files edited since the last verdict, and `after_save_s` the seconds from
    the last save to this one.
    """

    status: Status
    leaves: tuple[LeafCheck, ...] = ()
    reason: str = ""
    code: str = ""
    call: int = 0
    warnings: tuple[str, ...] = ()
    printed: str = ""
    changed: tuple[str, ...] = ()
    after_save_s: float | None = None

    def __bool__(self) -> bool:
        """True when the run reproduces what was captured."""
        return self.status.passed

    @property
    def worst(self) -> LeafCheck | None:
        """The leaf that decided the status, None when there is none."""
        bad = [leaf for leaf in self.leaves if leaf.status is self.status]
        return max(bad, key=lambda leaf: leaf.max_rel or 0.0, default=None)


class GradeLevel(Word):
    """How faithfully an entry is rebuilt."""

    EXACT = "exact"
    CLOSE = "close"
    SHAPE = "shape"
    NO = "no"


class Grade(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of verification: `level` is that of the outputs; other aspects apart.

    `strategy` is the way of rebuilding that won: "init" (the constructor call) or "structure".
    `reasons` maps an aspect ("outputs", "buffers", "param_grads", "input_grads") to the reason's
    code and text where the aspect is not exact. An aspect is None where there is nothing to grade.
    """

    level: GradeLevel
    strategy: str = ""
    outputs: GradeLevel | None = None
    buffers: GradeLevel | None = None
    param_grads: GradeLevel | None = None
    input_grads: GradeLevel | None = None
    reasons: dict[str, tuple[str, str]] = {}
    max_abs: float | None = None
    calls: int = 0

    @property
    def reason(self) -> str:
        """The reason's text for the first aspect that is not exact, or an empty string."""
        for code, text in self.reasons.values():
            return f"{code}: {text}" if text else code
        return ""

    def __str__(self) -> str:
        return self.level.value

    def __eq__(self, other: object) -> bool:
        """Equal grades; also equal to the word of its level: `entry.grade == "exact"`."""
        if isinstance(other, str):
            return self.level.value == other
        return isinstance(other, Grade) and astuple(self) == astuple(other)

    def __hash__(self) -> int:
        return hash(self.level.value)
