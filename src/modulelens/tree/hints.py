"""Type hints as values: `Union[Tensor, None]`, `list[int]`. Apart into a form and its arguments.

Libraries that look at their own signatures keep them. Nothing is called but typing itself.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from typing import Any

from modulelens.errors import Corrupted

_typing: Any = typing
_FORMS = (_typing.Union, _typing.Literal, _typing.List, _typing.Tuple, _typing.Callable)
_MADE = (
    *(_typing.Optional[int], _typing.Literal[1], _typing.List[int], _typing.Tuple[int]),
    *(_typing.Callable[[int], int], list[int], _typing.Union[int, str]),
)
#: Types of what typing names, and of what its forms make. From Python 3.14 on, Union is a class.
FORM_TYPES = frozenset(map(type, _FORMS)) - {type}
HINT_TYPES = frozenset(map(type, _MADE)) | {types.UnionType}


def form_named(name: str) -> Any:
    """The form of typing that has this name; Corrupted for all else that lies there."""
    found = vars(typing).get(name)
    if type(found) not in FORM_TYPES:
        raise Corrupted(f"typing.{name} is no form of a type hint")
    return found


def hint_apart(hint: Any) -> tuple[Any, ...]:
    """Its form and its arguments; the form of `int | str` is None."""
    if isinstance(hint, types.UnionType):
        return (None, *hint.__args__)
    named = vars(typing).get(getattr(hint, "_name", None) or "")
    origin = hint.__origin__
    form = named if isinstance(origin, type) and type(named) in FORM_TYPES else origin
    return (form, *hint.__args__)


def hint_made(form: Any, *args: Any) -> Any:
    """The hint again."""
    if form is None:
        return functools.reduce(operator.or_, args)
    if isinstance(form, type):
        return types.GenericAlias(form, args)
    if form is _typing.Callable:
        *given, result = args
        return form[... if given == [...] else given, result]
    if type(form) not in FORM_TYPES:
        raise Corrupted(f"{form!r} is no form of a type hint")
    return form[args[0] if len(args) == 1 else args]
