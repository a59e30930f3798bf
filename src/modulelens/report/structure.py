"""A captured value as one readable line, and its tensors by path.

Reads the JSON grammar of `records.Structure`; a node it does not know is shown by its name, so that
a value written by a newer or foreign encoder still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from modulelens.errors import Corrupted
from modulelens.records import Structure, TensorRef, TensorSpec, as_ref
from modulelens.report.table import clean

_LONGEST_TEXT = 40
_MOST_ITEMS = 8
_MOST_LEVELS = 100


def tensor(spec: TensorSpec) -> str:
    """`float32[2,64,512]`, with the stride appended where it is not the contiguous one."""
    text = f"{spec.dtype}[{','.join(map(str, spec.shape))}]"
    if spec.layout != "strided":
        return f"{text} {spec.layout}"
    return text if is_contiguous(spec) else f"{text} stride ({','.join(map(str, spec.stride))})"


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether `stride` is that of a C-contiguous tensor; dimensions of size 1 do not count."""
    if not spec.stride or spec.numel == 0:
        return True
    expected = 1
    for length, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def signature(args: Structure, kwargs: Structure) -> str:
    """A call's arguments as they would be written: `(float32[2,64], mask=None)`."""
    positional = [value(item) for item in _items(args)]
    named = [f"{shown_text(key)}={value(item)}" for key, item in _named(kwargs)]
    return f"({', '.join(positional + named)})"


def value(node: Structure) -> str:
    """One value as it would be written in Python, tensors by dtype and shape."""
    return _value(_pruned(node, _MOST_LEVELS))


def _pruned(node: Structure, levels: int) -> Structure:
    # What lies deeper is never read, and a stranger's value may be deeper than Python can walk.
    if not isinstance(node, (dict, list)):
        return node
    if not levels:
        return "..."
    if isinstance(node, list):
        return [_pruned(item, levels - 1) for item in node]
    return {key: _pruned(item, levels - 1) for key, item in node.items()}


def _value(node: Structure) -> str:
    if isinstance(node, str):
        return repr(node if len(node) <= _LONGEST_TEXT else node[:_LONGEST_TEXT] + "...")
    if isinstance(node, list):
        return f"[{_several(node)}]"
    if not isinstance(node, dict):
        return repr(node)
    tag = _tag(node)
    if tag is None:
        return f"{{{_mapping([[key, item] for key, item in node.items()])}}}"
    body = node[tag]
    try:
        return _RENDER[tag](body) if tag in _RENDER else _unknown(tag, body)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, Corrupted):
        # A damaged or foreign node must not hide the rest of the page.
        return _unknown(tag, body)


def leaves(node: Structure, path: str) -> list[tuple[str, TensorRef]]:
    """All tensors inside a value, each with a path that reads like code: `output["logits"]`."""
    return list(_leaves(_pruned(node, _MOST_LEVELS), path))


def call_leaves(args: Structure, kwargs: Structure) -> list[tuple[str, TensorRef]]:
    """The tensors of a call's arguments; paths are `args[0]...` and the keywords' names."""
    found = [leaf for i, item in enumerate(_items(args)) for leaf in leaves(item, f"args[{i}]")]
    return found + [leaf for key, item in _named(kwargs) for leaf in leaves(item, key)]


def _last_name(path: object) -> str:
    return clean(str(path)).replace(":", ".").rsplit(".", 1)[-1]


def _unknown(tag: str, body: Any) -> str:
    name = tag.removeprefix("$")
    if isinstance(body, dict) and "cls" in body:
        name = _last_name(body["cls"])
    if isinstance(body, str | int | float):
        return f"{clean(name)}({shown_text(body)})"
    inside = [f"{shown_text(key)}={_value(item)}" for key, item in _members(body)]
    return f"{clean(name)}({', '.join(inside[:_MOST_ITEMS])})"


def shown_text(body: object) -> str:
    """A scalar as text of bounded length."""
    text = clean(str(body))
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."


def _tuple(body: Any) -> str:
    return f"({_several(body)}{',' if len(body) == 1 else ''})"


def _mapping(body: Any) -> str:
    shown = [f"{_value(key)}: {_value(item)}" for key, item in body[:_MOST_ITEMS]]
    return ", ".join(shown + _rest(len(body)))


def _several(nodes: list[Structure]) -> str:
    return ", ".join([_value(node) for node in nodes[:_MOST_ITEMS]] + _rest(len(nodes)))


def _rest(number: int) -> list[str]:
    return [f"... {number} in all"] if number > _MOST_ITEMS else []


_RENDER: dict[str, Callable[[Any], str]] = {
    "$tensor": lambda body: tensor(as_ref(body).spec),
    "$parameter": lambda body: f"Parameter {tensor(as_ref(body).spec)}",
    "$tuple": _tuple,
    "$size": lambda body: f"Size({_several(body)})",
    "$dict": lambda body: f"{{{_mapping(body)}}}",
    "$odict": lambda body: f"OrderedDict({{{_mapping(body)}}})",
    "$set": lambda body: f"{{{_several(body)}}}",
    "$frozenset": lambda body: f"frozenset({{{_several(body)}}})",
    "$float": shown_text,
    "$int": shown_text,
    "$dtype": lambda body: f"torch.{shown_text(body)}",
    "$torch": lambda body: f"torch.{shown_text(body)}",
    "$device": lambda body: repr(shown_text(body)),
    "$const": shown_text,
    "$class": _last_name,
    "$function": _last_name,
    "$enum": lambda body: f"{_last_name(body[0])}.{clean(body[1])}",
    "$opaque": lambda body: f"<{_last_name(body['type'])}: not kept>",
    "$ref": lambda body: f"<same as object {int(body)}>",
}


def _members(body: Any) -> list[tuple[str, Structure]]:
    """What a node of the general rule holds by name: attributes, slots, or its own fields."""
    if not isinstance(body, dict):
        return []
    if "vars" in body or "slots" in body:
        return _named(body.get("vars")) + _named(body.get("slots"))
    fields = {key: item for key, item in body.items() if key not in ("cls", "items")}
    return list(fields.items())


def _items(args: Structure) -> list[Structure]:
    if isinstance(args, dict):
        args = args.get("$tuple", args.get("items"))
    return args if isinstance(args, list) else []


def _named(kwargs: Structure) -> list[tuple[str, Structure]]:
    if not isinstance(kwargs, dict):
        return []
    if "$dict" in kwargs:
        return [(str(key), item) for key, item in _pairs(kwargs["$dict"])]
    return list(kwargs.items())


def _pairs(body: Any) -> list[list[Any]]:
    pairs = body if isinstance(body, list) else []
    return [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def _tag(node: dict[str, Any]) -> str | None:
    return next((key for key in node if key.startswith("$")), None)


def _leaves(node: Structure, path: str) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _leaves(item, f"{path}[{i}]")
    if not isinstance(node, dict):
        return
    tag = _tag(node)
    if tag is None:
        for key, item in node.items():
            yield from _leaves(item, f'{path}["{key}"]')
    elif tag in ("$tensor", "$parameter"):
        yield path, as_ref(node[tag])
    elif tag in ("$dict", "$odict"):
        for key, item in _pairs(node[tag]):
            yield from _leaves(
                item, f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key}]"
            )
    else:
        yield from _leaves_inside(node[tag], path)


def _leaves_inside(body: Any, path: str) -> Iterator[tuple[str, TensorRef]]:
    yield from _leaves(_items(body), path)
    for name, item in _members(body):
        yield from _leaves(item, f"{path}.{name}")
