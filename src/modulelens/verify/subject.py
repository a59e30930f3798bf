"""What is judged: an entry's own code, or a candidate in its place. Runs and compares nothing."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from modulelens.measure.candidate import load_candidate
from modulelens.measure.run import Run
from modulelens.replay import Replay, Replayed


@dataclasses.dataclass(frozen=True)
class Subject:
    """An entry and what is to compute the same; without `edited` and `function` the entry's code.

    Args:
        original: The entry with the code that was captured.
        edited: The entry with another class in the captured one's place.
        function: A module or callable that takes the module's arguments.
        name: What it is called in a verdict.
    """

    original: Replay
    edited: Replay | None = None
    function: Callable[..., Any] | None = None
    name: str = ""

    @property
    def replay(self) -> Replay:
        """The entry with the code that is judged, or that a function takes the place of."""
        return self.edited or self.original

    @property
    def own(self) -> bool:
        """Whether it is the module with the code that is found today."""
        return self.function is None and not self.replay.edited

    def run(self, ready: Replayed, call: int) -> Run:
        """Its run of a call that `replay` made ready.

        Raises:
            NotFound: It lacks the method that was called.
        """
        if self.function is None:
            return ready.run
        inputs = ready.run.args, ready.run.kwargs
        if _takes_module(self.function):
            bound = functools.partial(self.function, ready.module)
            return self.replay.run(bound, call, inputs, ready.module)
        return self.replay.run(self.function, call, inputs)


def subject_of(replay: Callable[..., Replay], candidate: Any = None) -> Subject:
    """The subject that a candidate is, on the entry that `replay(class_map=...)` brings to life.

    A class takes the captured one's place; of `"path/file.py:Name"` the file is run.

    Raises:
        NotFound: There is no such file or name.
        CandidateBroken: The file cannot be run.
    """
    original = replay()  # first: it makes the entry's package importable, for the candidate as well
    found = load_candidate(candidate)
    name = candidate
    if not isinstance(candidate, str):
        name = getattr(found, "__qualname__", type(found).__qualname__) if found is not None else ""
    if isinstance(found, type):
        return Subject(original, replay(class_map={original.metadata.cls: found}), name=name)
    return Subject(original, function=found, name=name)


def _takes_module(function: Callable[..., Any]) -> bool:
    """Whether its first parameter is `module`: it gets the rebuilt one, for its weights."""
    if isinstance(function, nn.Module):
        return False
    try:
        return next(iter(inspect.signature(function).parameters), "") == "module"
    except (TypeError, ValueError):
        return False
