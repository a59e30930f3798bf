"""Runs one GraphQL document on plain Python objects; knows the syntax, not the meaning of a field.

There is no schema: an object's fields are its public attributes, a field with arguments is a method
that takes them as keywords, and a dict stands for an object too. What an object has not got is
`Unknown`: that is how an operation that came with a newer SDK gets noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from graphql import parse
from graphql.language import (
    DocumentNode,
    FieldNode,
    FragmentDefinitionNode,
    FragmentSpreadNode,
    OperationDefinitionNode,
    OperationType,
    SelectionSetNode,
    ValueNode,
)

INTERFACES = {"ArtifactCollection": {"ArtifactSequence", "ArtifactPortfolio"}}


class Refused(Exception):
    """The server says no: `message` is what the SDK shows, `status` the HTTP status."""

    def __init__(self, message: str, status: int = 200, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Unknown(Refused):
    """The request names something that this server does not have; the test must fail."""


@lru_cache(maxsize=512)
def parsed(query: str) -> DocumentNode:
    """The syntax tree; the SDK sends few texts many times."""
    return parse(query, no_location=True)


def operation_of(document: DocumentNode) -> OperationDefinitionNode:
    """The one operation of a document; the SDK leaves the request's operationName empty."""
    return next(d for d in document.definitions if isinstance(d, OperationDefinitionNode))


def name_of(operation: OperationDefinitionNode) -> str:
    """What the recorder and the faults call it."""
    return operation.name.value if operation.name else "?"


def is_mutation(operation: OperationDefinitionNode) -> bool:
    """Whether it may change the state."""
    return operation.operation is OperationType.MUTATION


def typename(value: object) -> str:
    """The GraphQL type of an object: its class, or what a dict says."""
    if isinstance(value, dict):
        return str(value.get("__typename", "?"))
    return type(value).__name__


class Execution:
    """One execution of one document."""

    def __init__(self, document: DocumentNode, variables: dict[str, Any]) -> None:
        self.operation = operation_of(document)
        self.fragments = {
            d.name.value: d for d in document.definitions if isinstance(d, FragmentDefinitionNode)
        }
        self.variables: dict[str, Any] = {}
        for declared in self.operation.variable_definitions or ():
            name = declared.variable.name.value
            default = declared.default_value
            if name in variables:
                self.variables[name] = variables[name]
            elif default is not None:
                self.variables[name] = self.value(default)

    def answer(self, root: object) -> dict[str, Any]:
        """The `data` of the reply. A mutation's one argument, `input`, is passed as keywords."""
        return self.resolve(root, [self.operation.selection_set], is_mutation(self.operation))

    def value(self, node: ValueNode) -> Any:
        """A literal or variable as a Python value; a variable that was not sent is None."""
        match node.kind:
            case "variable":
                return self.variables.get(node.name.value)  # type: ignore[attr-defined]
            case "int_value":
                return int(node.value)  # type: ignore[attr-defined]
            case "float_value":
                return float(node.value)  # type: ignore[attr-defined]
            case "null_value":
                return None
            case "list_value":
                return [self.value(v) for v in node.values]  # type: ignore[attr-defined]
            case "object_value":
                return {f.name.value: self.value(f.value) for f in node.fields}  # type: ignore[attr-defined]
            case _:
                return node.value  # type: ignore[attr-defined]

    def resolve(
        self, source: object, selections: list[SelectionSetNode], flat: bool = False
    ) -> dict[str, Any]:
        """The selected fields of one object, merged over its selection sets."""
        found: dict[str, list[FieldNode]] = {}
        for selection in selections:
            for node in self.fields(selection, source):
                found.setdefault((node.alias or node.name).value, []).append(node)
        return {key: self.field(source, nodes, flat) for key, nodes in found.items()}

    def fields(self, selection: SelectionSetNode, source: object) -> Iterator[FieldNode]:
        """The field nodes that apply to `source`, through fragments."""
        for node in selection.selections:
            if self.skipped(node):
                continue
            if isinstance(node, FieldNode):
                yield node
                continue
            fragment: Any = node
            if isinstance(node, FragmentSpreadNode):
                fragment = self.fragments[node.name.value]
            condition = fragment.type_condition
            if condition is None or applies(condition.name.value, source):
                yield from self.fields(fragment.selection_set, source)

    def skipped(self, node: Any) -> bool:
        """What @include and @skip say."""
        for directive in node.directives or ():
            wanted = self.value(directive.arguments[0].value)
            if bool(wanted) is (directive.name.value == "skip"):
                return True
        return False

    def field(self, source: object, nodes: list[FieldNode], flat: bool) -> Any:
        """One field of one object, with everything below it."""
        name = nodes[0].name.value
        if name == "__typename":
            return typename(source)
        args = {a.name.value: self.value(a.value) for a in nodes[0].arguments or ()}
        if flat:
            # The SDK's core sends every key that its input type has, null where it says nothing.
            args = {k: v for k, v in args["input"].items() if v is not None}
        below = [node.selection_set for node in nodes if node.selection_set]
        return self.complete(fetch(source, name, args), below, f"{typename(source)}.{name}")

    def complete(self, value: object, below: list[SelectionSetNode], where: str) -> Any:
        """A value with its selections resolved; scalars as they are."""
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            return [self.complete(item, below, where) for item in value]
        scalar = isinstance(value, (str, int, float, bool))
        if scalar == bool(below):
            raise Unknown(f"{where} is {'no' if scalar else 'an'} object with fields")
        return value if scalar else self.resolve(value, below)


def applies(condition: str, source: object) -> bool:
    """Whether a fragment on type `condition` holds for this object."""
    own = typename(source)
    return own in {"?", condition} or own in INTERFACES.get(condition, ())


def fetch(source: object, name: str, args: dict[str, Any]) -> Any:
    """The value of a field, called with its arguments.

    Raises:
        Unknown: `source` has no such field, or the field no such argument.
    """
    if isinstance(source, dict):
        known = name in source
        value = source.get(name)
    else:
        known = not name.startswith("_") and hasattr(source, name)
        value = getattr(source, name, None)
    if not known:
        raise Unknown(f'Cannot query field "{name}" on type "{typename(source)}".')
    takes = parameters(value) if callable(value) else frozenset()
    for arg in args:
        if arg not in takes:
            raise Unknown(f'Unknown argument "{arg}" on field "{typename(source)}.{name}".')
    return value(**args) if callable(value) else value


def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names that a field takes."""
    return named(getattr(function, "__func__", function))


@lru_cache(maxsize=512)
def named(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters) - {"self"}
