"""An entry's record and bytes -> rebuilt module, inputs, reference values, and runs of them.

Joins `rebuild` and `measure`. Knows where an entry's classes may come from on this machine; a
verdict on a run is `verify.py`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from modulelens.capture.moved import find_moved
from modulelens.capture.reach import changed
from modulelens.capture.select import is_method
from modulelens.capture.source import source_of
from modulelens.context import RngState, preserved_rng, set_rng, under
from modulelens.errors import ClassNotFound, Corrupted, ModuleLensError, NotFound, NotRebuildable
from modulelens.measure.compare import places
from modulelens.measure.run import Run
from modulelens.rebuild import (
    Payload,
    Rebuilder,
    Strategy,
    Synthesizer,
    Tensors,
    class_of_script,
    usable_device,
)
from modulelens.records import Call, Metadata, Rng, Structure
from modulelens.tree import Decoder, Importer, flatten
from modulelens.tree.kinds import check_twister
from modulelens.tree.shards import parts_in

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_MOST_NOTES = 8
#: What torch, numpy and Python raise at switches and states that are none.
_NO_CONTEXT = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError)


@dataclasses.dataclass
class Replayed:
    """One call, ready to run: the rebuilt module and the run of it on its inputs.

    `synthesized` says what was: "weights", "inputs", "weights and inputs", or nothing.
    """

    module: nn.Module
    run: Run
    synthesized: str
    warnings: tuple[str, ...] = ()


class Replay:
    """Brings one entry to life.

    Args:
        payload: The entry's record and bytes.
        device: Where modules and tensors are made.
        allow: Top-level packages whose classes may be imported besides the entry's own.
        class_map: Class path -> class, for classes that were moved, renamed or edited.
        refuse_roots: Folders that code is never imported from (the repo itself).

    Raises:
        UsageError: Torch knows no such device.
        EnvironmentLacks: This machine, or this torch, has none.
    """

    def __init__(
        self,
        payload: Payload,
        *,
        device: str = "cpu",
        allow: Iterable[str] = (),
        class_map: Mapping[str, Any] | None = None,
        refuse_roots: Iterable[Path] = (),
    ) -> None:
        self.payload = payload
        self.device = usable_device(device)
        redirect = {_full(path, payload.metadata): cls for path, cls in (class_map or {}).items()}
        metadata = payload.metadata
        self._refused = tuple(root.resolve() for root in refuse_roots)
        _make_importable(metadata, self._refused)
        # What a record allows itself must not reach the standard library: it can do anything.
        own = [p for p in metadata.packages if p not in sys.stdlib_module_names]
        self.importer = Importer([*own, *allow], redirect, main=self._of_main)
        self.edited = frozenset(redirect)
        self.rewritten: frozenset[str] = frozenset()
        self.gone_round = ""
        self.changed_beside: dict[str, tuple[str, ...]] = {}

    @property
    def metadata(self) -> Metadata:
        """The entry's record."""
        return self.payload.metadata

    @functools.cached_property
    def drifted(self) -> frozenset[str]:
        """Class paths whose code is not what it was when captured, redirected ones included.

        That is their own source (`rewritten`), or what they reach beside it (`changed_beside`): a
        helper, a constant, a factory, a base.
        """
        sources = self.metadata.sources
        today = {path: cls for path in sources if (cls := self._found(path)) is not None}
        self.rewritten = frozenset(
            p for p, c in today.items() if source_of(c).digest not in ("", sources[p])
        )
        names = {path: changed(cls, self.metadata.beside) for path, cls in today.items()}
        self.changed_beside = {path: found for path, found in names.items() if found}
        return self.edited | self.rewritten | self.changed_beside.keys()

    def _found(self, path: str) -> type | None:
        try:
            found = self.importer.get(path)
        except ModuleLensError:
            return None
        return found if isinstance(found, type) else None

    def _of_main(self, name: str) -> Any:
        file = self.metadata.main_file
        found: Any = sys.modules.get("__main__")
        live = getattr(found, "__file__", None)
        if (str(Path(live).resolve()) if live else "") == file:
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is not None:
                return found
        if not (file and _trusted(Path(file), self._refused) and Path(file).is_file()):
            where = f"{file or 'an interactive session'}, which is not here or not to be trusted"
            raise ClassNotFound(
                f"__main__:{name} was defined in {where}",
                hint="put the class into a module that can be imported, or run where the script is;"
                " nothing inside the repo's folder, or of another user, is run",
            )
        return class_of_script(file, name)

    @property
    def gap(self) -> str:
        """What of its weights was not kept, where rows of tables were; empty where none."""
        if not self.metadata.table_rows:
            return ""
        names = ", ".join(self.metadata.table_rows)
        hint = "if it uses others as well, trace with Keep(embedding_rows='all')"
        return f"only the rows that were looked up were kept of {names}; {hint}"

    @functools.cached_property
    def parts(self) -> frozenset[int]:
        """The ranks over which its weights, inputs and outputs lie in parts; empty: it is whole."""
        calls = self.metadata.calls
        nodes = [node for digest in {c.node for c in calls} for node in self.payload.nodes(digest)]
        weights = [(node.parameters, node.buffers, node.attributes) for node in nodes]
        values = [(c.args, c.kwargs, c.output) for c in calls]
        return frozenset(rank for body in parts_in([*weights, *values]) for rank in body["ranks"])

    # ---- the parts

    def call(self, index: int) -> Call:
        """The record of one call.

        Raises:
            NotFound: There is no call of that number.
        """
        calls, more = self.metadata.calls, self.metadata.dropped_calls
        if not 0 <= index < len(calls):
            dropped = f", {more} more were not kept" if more else ""
            raise NotFound(
                f"{self.metadata.name} has {len(calls)} call(s){dropped}; there is no call {index}"
            )
        return calls[index]

    def strategies(self) -> tuple[Strategy, ...]:
        """The ways of rebuilding, the one to try first in front."""
        grade = self.metadata.grade
        chosen = grade.strategy if grade else ""
        root = self.payload.node(self.metadata.node)
        # New code may set new attributes: only its constructor makes them.
        by_init = chosen == "init" or (root.cls in self.drifted and root.init is not None)
        if not (chosen or by_init):
            by_init = any(node.opaque for node in self.payload.nodes(self.metadata.node))
        return ("init", "structure") if by_init else ("structure", "init")

    def module(self, call: int = 0, strategy: Strategy | None = None) -> nn.Module:
        """The module in the state it had when that call was entered.

        Raises:
            NotRebuildable: No way of rebuilding works; the reason is the first one's.
            ClassNotFound: Its class cannot be imported here.
        """
        return self._rebuilt(call, strategy, Synthesizer(0))[0]

    def _rebuilt(
        self, call: int, strategy: Strategy | None, synthesizer: Synthesizer, strict: bool = False
    ) -> tuple[nn.Module, Rebuilder]:
        ways = self.strategies() if strategy is None else (strategy,)
        failure: ModuleLensError | None = None
        for way in ways:
            tensors = Tensors(self.payload.storage, self.device, synthesizer)
            rebuilder = Rebuilder(self.payload, self.importer, tensors, self.drifted)
            try:
                return rebuilder.rebuild(self.call(call).node, way), rebuilder
            except ModuleLensError as error:
                failure = failure or error
                raised = isinstance(error, NotRebuildable) and error.reason == "runtime_error"
                if raised and way == "init" and self.metadata.cls in self.drifted:
                    # An edit's own error is not gone round; a candidate may be made in other ways.
                    if strict and self.metadata.cls not in self.edited:
                        break
                    self.gone_round = f"{error.message}: it was rebuilt without that"
        assert failure is not None
        if isinstance(failure, ClassNotFound):
            failure.did_you_mean = self._moved(failure.message)
        raise failure

    def _moved(self, message: str) -> tuple[str, ...]:
        """Classes with the source of the one that the message names."""
        path = message.partition(" ")[0]
        digest = self.metadata.sources.get(path, "")
        package = path.partition(":")[0].partition(".")[0]
        root = self.metadata.roots.get(package, "")
        if not (digest and package.isidentifier() and _trusted(Path(root), self._refused)):
            return ()
        return tuple(found for found in find_moved(path, digest, root) if found != path)

    def bare(self, call: int = 0) -> tuple[nn.Module, str]:
        """The tensors of the module where its class cannot be had, and which of them were made up.

        Plain modules hold them under their names; none of them can be called.
        """
        synthesizer = Synthesizer(0)
        tensors = Tensors(self.payload.storage, self.device, synthesizer)
        rebuilder = Rebuilder(self.payload, self.importer, tensors)
        return rebuilder.bare(self.call(call).node), "weights" if synthesizer.made else ""

    def inputs(self, call: int = 0, seed: int = 0) -> Inputs:
        """Arguments of that call, as `ready` gives; synthesised where only shapes were kept."""
        tensors = Tensors(self.payload.storage, self.device, Synthesizer(seed))
        return self._inputs(self.call(call), tensors)

    def _inputs(
        self, call: Call, tensors: Tensors, module: Callable[[Any], nn.Module] | None = None
    ) -> Inputs:
        decoder = Decoder(
            tensors.get_input, self.importer, module, self.device, strict="an argument"
        )
        args, kwargs = decoder.decode(call.args), decoder.decode(call.kwargs)
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise Corrupted(f"the arguments of call {call.index} are no tuple and dict")
        return args, kwargs

    def value(self, structure: Structure, synthesizer: Synthesizer | None = None) -> Any:
        """The value of a structure of this entry, in memory of its own.

        Raises:
            NotRebuildable: Only its shape was kept, and nothing makes up values.
        """
        tensors = Tensors(self.payload.storage, self.device, synthesizer)
        return Decoder(tensors.get, self.importer, lambda body: body, self.device).decode(structure)

    def gradient(self, structure: Structure, synthesizer: Synthesizer | None = None) -> Tensor:
        """A captured gradient: the sum over the backward passes of the step."""
        nodes = structure.get("$sum") if isinstance(structure, dict) else None
        parts = [self.value(n, synthesizer) for n in nodes] if isinstance(nodes, list) else []
        shapes = {part.shape if isinstance(part, Tensor) else None for part in parts}
        if len(shapes) != 1 or None in shapes:
            raise Corrupted("a gradient is no sum of tensors")
        total: Tensor = functools.reduce(operator.add, parts)
        return total

    def _rng(self, rng: Rng) -> RngState:
        values = {name: self.value(part) for name, part in msgspec.structs.asdict(rng).items()}
        state = RngState(**values | {"devices": tuple(values["devices"] or ())})
        check_twister(state.numpy[1] if state.numpy else 0)
        return state

    # ---- running

    def ready(self, call: int = 0, strategy: Strategy | None = None, seed: int = 0) -> Replayed:
        """The call, ready to run under its captured context."""
        synthesizer = Synthesizer(0)  # weights are those that `module` gives
        module, rebuilder = self._rebuilt(call, strategy, synthesizer, strict=True)
        weights, synthesizer.seed = synthesizer.made, seed
        inputs = self._inputs(self.call(call), rebuilder.tensors, rebuilder.module_value)
        run = self.run(module, call, inputs)
        made = {"weights": weights, "inputs": synthesizer.made - weights}
        what = " and ".join(name for name, count in made.items() if count)
        return Replayed(module, run, what, tuple(rebuilder.notes[:_MOST_NOTES]))

    def run(
        self, module: Callable[..., Any], call: int, inputs: Inputs, owner: nn.Module | None = None
    ) -> Run:
        """A run of any callable on those inputs, under the call's captured context.

        Of a module, the method that was called is run: for `forward`, what torch does at a call,
        as a capture begins inside an own `__call__` of its class. `owner` is whose state a
        function changes.

        Raises:
            Corrupted: The context, or a random stream, is none that torch can be in.
            NotFound: It has no such method.
        """
        record = self.call(call)
        ambient = record.context.ambient
        try:
            rng = self._rng(record.context.rng)
            with under(ambient, device=self.device), preserved_rng():
                set_rng(rng)
        except _NO_CONTEXT as error:
            raise Corrupted(f"the context of call {call} cannot be set: {error}") from error
        if isinstance(module, nn.Module) and record.method != "forward":
            if not is_method(type(module), record.method):
                raise NotFound(
                    f"{type(module).__qualname__} has no method {record.method!r}, which call"
                    f" {call} of {self.metadata.name} is a call of",
                    hint="give it one of that name, or pass a function",
                )
            module = getattr(module, record.method)
        elif isinstance(module, nn.Module) and self._is_own_call(type(module).__call__):
            module = types.MethodType(nn.Module.__call__, module)
        return Run(module, *inputs, context=ambient, rng=rng, owner=owner)

    def _is_own_call(self, called: Callable[..., Any]) -> bool:
        own = getattr(self._found(self.metadata.cls), "__call__", None)  # noqa: B004 - it's taken
        return called is own and called is not nn.Module.__call__

    def seeds(self, call: int, output: Any) -> list[Tensor | None]:
        """The captured gradients for the output's leaves that require grad, in their order.

        Synthesised where only shapes were kept.
        """
        captured = self.call(call).grad_output
        flat = flatten(output)
        numbers = map(str, places(self.call(call).output, flat))
        return [
            self.gradient(captured[n], Synthesizer(0)) if n in captured else None
            for tensor, n in zip(flat.tensors, numbers, strict=True)
            if tensor.requires_grad
        ]


def _full(path: str, metadata: Metadata) -> str:
    if ":" in path:
        return path
    for known in (metadata.cls, *metadata.sources):
        if path in (known.partition(":")[2], known.replace(":", ".")):
            return known
    text = f"class_map names {path!r}, which is no class of {metadata.name}"
    raise NotFound(text, hint="use module:Class")


def _make_importable(metadata: Metadata, refused: tuple[Path, ...]) -> None:
    """Appends the folder that a package was found in at capture time, if it is not found here.

    Appended, so that it shadows nothing; only folders of this user, and never inside the repo:
    a repo is shared, and what it says is not trusted.
    """
    for package, root in metadata.roots.items():
        if not package.isidentifier() or package in sys.modules or root in sys.path:
            continue
        if importlib.util.find_spec(package) is None and _trusted(Path(root), refused):
            sys.path.append(root)


def _trusted(path: Path, refused: tuple[Path, ...]) -> bool:
    """Whether code may come from there: an absolute path, of this user, and not in the repo."""
    try:
        owner = path.stat().st_uid
    except (OSError, ValueError):
        return False
    owned = not hasattr(os, "getuid") or owner in (0, os.getuid())
    inside = any(path.resolve().is_relative_to(root) for root in refused)
    return path.is_absolute() and owned and not inside
