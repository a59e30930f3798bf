"""Expected and actual values -> leaves and a verdict. Knows nested values, runs nothing.

In this order: structure, shape and dtype, NaN and infinity positions, values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from modulelens.measure.tolerance import check_tensor, powerless
from modulelens.measure.untouched import untouched
from modulelens.records import Check, LeafCheck, Status, Structure, bodies_of, tensor_refs
from modulelens.tree import Flat, flatten

_FLOAT_TOLERANCE = 1e-5
_TENSOR_KEYS = ("$tensor", "$parameter")


@untouched
def compare(
    expected: Any, actual: Any, *, path: str = "output", anchor: Any = None, same_code: bool = True
) -> list[LeafCheck]:
    """Compares two nested values leaf by leaf.

    Args:
        expected: What the original gave.
        actual: What is judged.
        path: Put in front of every leaf's path.
        anchor: What the original gives in float64 on the same rounded inputs; None: unknown.
        same_code: The same code on the same device: tensors and numbers must be bit-equal.
            Otherwise the anchored rule of `tolerance`; without a usable anchor, 64 epsilon of
            the row maximum (4 for 16 bits and fewer). Integers, bools and strings stay exact, and
            sparse tensors are coalesced first.

    Returns:
        One leaf per tensor and per plain value that differs; at least one.
    """
    left, right = flatten(expected), flatten(actual)
    if not same_code:
        _coalesce(left)
        _coalesce(right)
    anchors = _anchor_tensors(left, anchor)
    found = dict.fromkeys(_walk(left.structure, right.structure, path, same_code))
    leaves: list[LeafCheck] = []
    for i, j in (pair for pair in found if isinstance(pair, tuple)):
        sides = left.tensors[i], right.tensors[j], anchors.get(i)
        leaves.append(check_tensor(*sides, path=path + left.paths[i], same_code=same_code))
    leaves += [leaf for leaf in found if isinstance(leaf, LeafCheck)]
    return leaves or [LeafCheck(path=path, status=Status.EXACT)]


@untouched
def verdict(
    leaves: Sequence[LeafCheck], *, code: str = "", call: int = 0, warnings: Sequence[str] = ()
) -> Check:
    """The check whose status is the worst of its leaves, with that leaf's message as the reason.

    Args:
        leaves: From one or more calls of `compare`; none: not comparable.
        code: Names the candidate.
        call: Number of the captured call.
        warnings: What weakens the verdict, such as `doubts`.
    """
    if not leaves:
        reason = "there is nothing to compare"
        return Check(status=Status.NOT_COMPARABLE, reason=reason, code=code, call=call)
    status = max((leaf.status for leaf in leaves), key=list(Status).index)
    check = Check(
        status=status, leaves=tuple(leaves), code=code, call=call, warnings=tuple(warnings)
    )
    worst = check.worst
    if worst is None or not worst.message:
        return check
    return msgspec.structs.replace(check, reason=f"{worst.path}: {worst.message}")


@untouched
def doubts(
    expected: Any, leaves: Sequence[LeafCheck], *, anchor: Any = None, inputs: Any = None
) -> list[str]:
    """What weakens a verdict over another implementation.

    A leaf that was judged without the anchored rule, and reference outputs that a candidate which
    computes nothing would match as well: a constant one, or one that passes on an input.
    """
    found = [
        f"{leaf.path} was judged by a fixed tolerance: there is no float64 reference for it"
        for leaf in leaves
        if leaf.max_abs and leaf.error_ratio is None and leaf.message.startswith("error")
    ]
    flat = flatten(expected)
    anchors = _anchor_tensors(flat, anchor)
    for i, tensor in enumerate(flat.tensors):
        why = powerless(tensor, anchors.get(i), flatten(inputs).tensors)
        if why:
            found.append(f"comparing output{flat.paths[i]} proves little: {why}")
    return found


def places(structure: Structure, flat: Flat) -> list[int]:
    """Per leaf the number of the captured one that stood in its place; -1: another stands for it.

    One object may stand where there were two, and two where there was one.
    """
    refs, spots = tensor_refs(structure), list(bodies_of(flat.structure, "$tensor"))
    if len(refs) != len(spots) or any(True for _ in bodies_of(flat.structure, "$parameter")):
        return list(range(len(flat.tensors)))
    order: dict[int, int] = {}
    numbers = [-1] * len(flat.tensors)
    for ref, spot in zip(refs, spots, strict=True):
        known = ref.object in order
        number = order.setdefault(ref.object if ref.object >= 0 else -2 - len(order), len(order))
        if not known and numbers[spot] < 0:
            numbers[spot] = number
    return numbers


def _walk(
    expected: Any, actual: Any, path: str, same_code: bool
) -> Iterator[tuple[int, int] | LeafCheck]:
    """Walks two structures at once: pairs their tensors, and notes what differs in between."""
    numbers = _tensor_number(expected), _tensor_number(actual)
    parts, others = _parts(expected), _parts(actual)
    if numbers[0] is not None and numbers[1] is not None:
        yield numbers[0], numbers[1]
    elif "$opaque" in parts:
        why = f"{_name(expected)}: {expected['$opaque']['why']}"
        yield LeafCheck(path=path, status=Status.NOT_COMPARABLE, message=why)
    elif type(expected) is type(actual) is list and len(parts) != len(others):
        yield _wrong(path, Status.MISMATCH_STRUCTURE, f"{len(parts)} items", f"{len(others)}")
    elif not isinstance(expected, dict | list) and not isinstance(actual, dict | list):
        if type(expected) is not type(actual) or expected != actual:
            close = type(expected) is type(actual) is float and not same_code
            close = close and math.isclose(expected, actual, rel_tol=_FLOAT_TOLERANCE)
            status = Status.CLOSE if close else Status.MISMATCH_VALUE
            yield _wrong(path, status, f"{expected!r:.80}", f"{actual!r:.80}")
    elif type(expected) is not type(actual) or parts.keys() != others.keys():
        yield _wrong(path, Status.MISMATCH_STRUCTURE, _name(expected), _name(actual))
    elif (keys := _keys(parts)) != (found := _keys(others)):
        wanted = f"keys in the order {keys!r:.100}"
        yield _wrong(path, Status.MISMATCH_STRUCTURE, wanted, f"{found!r:.100}")
    else:
        for key, part in parts.items():
            yield from _walk(part, others[key], path + _step(key), same_code)


def _parts(node: Any) -> dict[Any, Any]:
    if isinstance(node, list):
        return dict(enumerate(node))
    if not isinstance(node, dict):
        return {}
    return {
        key: _values_of(part) if key.startswith("$") and isinstance(part, dict) else part
        for key, part in node.items()
    }


def _keys(parts: dict[str, Any]) -> list[Any]:
    """The keys of a dict in their order; of tensors among them, that there is one."""
    pairs = parts.get("$dict", parts.get("$odict"))
    return list(parts) if pairs is None else [isinstance(k, dict) or repr(k) for k, _ in pairs]


def _wrong(path: str, status: Status, expected: str, actual: str) -> LeafCheck:
    return LeafCheck(path=path, status=status, message=f"expected {expected}, got {actual}")


def _coalesce(flat: Flat) -> None:
    """Puts sparse tensors into their one canonical form: sorted, each index once."""
    for body in bodies_of(flat.structure, "$sparse"):
        if not body["is_coalesced"]:
            parts = [_tensor_number(body[name]) for name in ("indices", "values")]
            indices, values = (flat.tensors[number or 0] for number in parts)
            size = body["size"]["$size"]
            made = torch.sparse_coo_tensor(indices, values, size, check_invariants=True).coalesce()
            for number, part in zip(parts, (made.indices(), made.values()), strict=True):
                flat.tensors[number or 0] = part
            body["is_coalesced"] = True


def _anchor_tensors(flat: Flat, anchor: Any) -> dict[int, Tensor]:
    """Number of a reference tensor -> its float64 twin, where there is one."""
    if anchor is None:
        return {}
    high = flatten(anchor)
    found = _walk(flat.structure, high.structure, "", same_code=False)
    return {pair[0]: high.tensors[pair[1]] for pair in found if isinstance(pair, tuple)}


def _tensor_number(node: Any) -> int | None:
    if isinstance(node, dict):
        for key in _TENSOR_KEYS:
            if type(node.get(key)) is int:
                return int(node[key])
    return None


def _values_of(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what says nothing about its values; attributes have no order."""
    return {
        k: dict(sorted(v.items())) if k in ("vars", "slots") and isinstance(v, dict) else v
        for k, v in body.items()
        if k not in ("requires_grad", "parameter")
    }


def _step(key: int | str) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return "" if key.startswith("$") or key in ("items", "inner", "vars", "slots") else f'["{key}"]'


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
