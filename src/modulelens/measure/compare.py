"""Expected and actual values -> leaves and a verdict. Knows nested values, runs nothing.

In this order: structure, shape and dtype, NaN and infinity positions, values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modulelens.measure.tolerance import check_tensor, powerless
from modulelens.records import Check, LeafCheck, Status
from modulelens.tree import Flat, flatten
from modulelens.tree.tensors import SPECIAL_KINDS

#: From best to worst: the status of a check is the worst of its leaves.
_SEVERITY = (
    Status.EXACT,
    Status.CLOSE,
    Status.NOT_COMPARABLE,
    Status.MISMATCH_VALUE,
    Status.MISMATCH_DTYPE,
    Status.MISMATCH_SHAPE,
    Status.MISMATCH_STRUCTURE,
    Status.TIMEOUT,
    Status.RUNTIME_ERROR,
)
_FLOAT_TOLERANCE = 1e-5
_TENSOR_KEYS = ("$tensor", "$parameter")


def compare(
    expected: Any,
    actual: Any,
    *,
    path: str = "output",
    anchor: Any = None,
    same_code: bool = True,
) -> list[LeafCheck]:
    """Compares two nested values leaf by leaf.

    Args:
        expected: What the original gave.
        actual: What is judged.
        path: Put in front of every leaf's path.
        anchor: What the original gives in float64 on the same rounded inputs; None: unknown.
        same_code: The same code on the same device: tensors and numbers must be bit-equal.
            Otherwise the anchored rule of `tolerance`; without a usable anchor, 64 epsilon of
            the row maximum (4 for 16 bits and fewer). Integers, bools and strings stay exact.

    Returns:
        One leaf per tensor and per plain value that differs; at least one.
    """
    flats = flatten(expected), flatten(actual)
    walk = _Walk(same_code=same_code)
    walk.visit(flats[0].structure, flats[1].structure, path)
    anchors = _anchor_tensors(flats[0], anchor)
    leaves = [
        check_tensor(
            flats[0].tensors[i],
            flats[1].tensors[j],
            anchors.get(i),
            path=path + flats[0].paths[i],
            same_code=same_code,
        )
        for i, j in walk.pairs
    ]
    leaves += walk.wrong
    return leaves or [LeafCheck(path=path, status=Status.EXACT)]


def verdict(
    leaves: Sequence[LeafCheck],
    *,
    code: str = "",
    reason: str = "",
    call: int = 0,
    warnings: Sequence[str] = (),
) -> Check:
    """The check whose status is the worst of its leaves.

    Args:
        leaves: From one or more calls of `compare`; none: not comparable.
        code: Names the candidate.
        reason: Says more than the leaves do; empty: the message of the worst leaf.
        call: Number of the captured call.
        warnings: What weakens the verdict, such as `doubts`.
    """
    if not leaves:
        reason = reason or "there is nothing to compare"
        return Check(status=Status.NOT_COMPARABLE, reason=reason, code=code, call=call)
    status = max((leaf.status for leaf in leaves), key=_SEVERITY.index)
    check = Check(status=status, leaves=tuple(leaves), code=code, call=call)
    worst = check.worst
    if not reason and worst is not None and worst.message:
        reason = f"{worst.path}: {worst.message}"
    return Check(
        status=status,
        leaves=tuple(leaves),
        reason=reason,
        code=code,
        call=call,
        warnings=tuple(warnings),
    )


def doubts(
    expected: Any, leaves: Sequence[LeafCheck], *, path: str = "output", anchor: Any = None
) -> list[str]:
    """What weakens a verdict over another implementation.

    A leaf that was judged without the anchored rule, and reference outputs that a candidate which
    computes nothing would match as well.
    """
    found = [
        f"{leaf.path} was judged by a fixed tolerance: there is no float64 reference for it"
        for leaf in leaves
        if leaf.max_abs and leaf.error_ratio is None and leaf.message.startswith("error")
    ]
    flat = flatten(expected)
    anchors = _anchor_tensors(flat, anchor)
    for i, tensor in enumerate(flat.tensors):
        why = powerless(tensor, anchors.get(i))
        if why:
            found.append(f"comparing {path}{flat.paths[i]} proves little: {why}")
    return found


class _Walk:
    """Walks two structures at once: pairs their tensors, and notes what differs in between."""

    def __init__(self, *, same_code: bool) -> None:
        self.pairs: dict[tuple[int, int], None] = {}
        self.wrong: list[LeafCheck] = []
        self._same_code = same_code

    def visit(self, expected: Any, actual: Any, path: str) -> None:
        left, right = _tensor_number(expected), _tensor_number(actual)
        if left is not None and right is not None:
            self.pairs[left, right] = None
        elif isinstance(expected, dict) and "$opaque" in expected:
            self._note(path, Status.NOT_COMPARABLE, f"{_name(expected)}: {_why(expected)}")
        elif isinstance(expected, dict) and isinstance(actual, dict) and left is right is None:
            self._dicts(expected, actual, path)
        elif isinstance(expected, list) and isinstance(actual, list):
            self._lists(expected, actual, path)
        elif isinstance(expected, dict | list) or isinstance(actual, dict | list):
            self._structure(path, _name(expected), _name(actual))
        elif not self._equal(expected, actual):
            self._note(
                path, Status.MISMATCH_VALUE, f"expected {expected!r:.80}, got {actual!r:.80}"
            )

    def _dicts(self, expected: dict[str, Any], actual: dict[str, Any], path: str) -> None:
        if expected.keys() != actual.keys():
            self._structure(path, _name(expected), _name(actual))
            return
        for key in expected:
            sides = expected[key], actual[key]
            if key in SPECIAL_KINDS:
                sides = _values_of(sides[0]), _values_of(sides[1])
            self.visit(*sides, _step(path, key))

    def _lists(self, expected: list[Any], actual: list[Any], path: str) -> None:
        if len(expected) != len(actual):
            self._structure(path, f"{len(expected)} items", f"{len(actual)}")
            return
        for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
            self.visit(left, right, f"{path}[{i}]")

    def _equal(self, expected: Any, actual: Any) -> bool:
        if type(expected) is float and type(actual) is float and not self._same_code:
            scale = max(abs(expected), abs(actual))
            return abs(expected - actual) <= _FLOAT_TOLERANCE * scale
        return type(expected) is type(actual) and bool(expected == actual)

    def _structure(self, path: str, expected: str, actual: str) -> None:
        self._note(path, Status.MISMATCH_STRUCTURE, f"expected {expected}, got {actual}")

    def _note(self, path: str, status: Status, message: str) -> None:
        self.wrong.append(LeafCheck(path=path, status=status, message=message))


def _anchor_tensors(flat: Flat, anchor: Any) -> dict[int, Any]:
    """Number of a reference tensor -> its float64 twin, where there is one."""
    if anchor is None:
        return {}
    high = flatten(anchor)
    walk = _Walk(same_code=False)
    walk.visit(flat.structure, high.structure, "")
    return {i: high.tensors[k] for i, k in walk.pairs}


def _tensor_number(node: Any) -> int | None:
    if isinstance(node, dict):
        for key in _TENSOR_KEYS:
            if type(node.get(key)) is int:
                return int(node[key])
    return None


def _values_of(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a special tensor without what says nothing about its values."""
    return {k: v for k, v in body.items() if k not in ("requires_grad", "parameter")}


def _step(path: str, key: str) -> str:
    if key.startswith("$") or key in ("items", "inner", "vars", "slots"):
        return path
    return f'{path}["{key}"]'


def _name(node: Any) -> str:
    """A short name of a structure, for messages."""
    if isinstance(node, list):
        return f"a list of {len(node)}"
    if not isinstance(node, dict):
        return f"{type(node).__name__} {node!r:.60}"
    if _tensor_number(node) is not None:
        return "a tensor"
    kind = next((key for key in node if key.startswith("$")), None)
    if kind is None:
        return f"a dict with keys {sorted(node)!r:.200}"
    body = node[kind]
    if isinstance(body, dict):
        return f"{kind[1:]} {body.get('cls') or body.get('type') or ''}".strip()
    return f"a {kind[1:]}" + (f" of {len(body)}" if isinstance(body, list) else f" {body!r:.60}")


def _why(node: dict[str, Any]) -> str:
    return str(node["$opaque"].get("why", "cannot be compared"))
