"""One stored capture: the door to everything that can be done with it.

Reading its record needs no torch; rebuilding, running and measuring import it when asked.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulelens.errors import NotFound, UsageError
from modulelens.records import Check, Comparison, Grade, Measurement, Metadata, Profile, SourceRef
from modulelens.store import LocalStore

if TYPE_CHECKING:
    import torch
    from torch import nn

    from modulelens.measure.apart import Apart
    from modulelens.replay import Replay
    from modulelens.report.diff import EntryDiff

Candidate = Any
_CHECK_TIMEOUT_S = 300.0
_WATCH_TIMEOUT_S = 60.0


class _Recorded:
    """What an entry's record says; reading it needs no torch."""

    def __init__(self, store: LocalStore, metadata: Metadata, allow: Iterable[str] = ()) -> None:
        self._store = store
        self._metadata = metadata
        self._allow = tuple(allow)

    def __repr__(self) -> str:
        grade = self.grade.level.value if self.grade else "unverified"
        cls, record = self.cls.partition(":")[2], self.metadata
        rows = (f", {n:,} of {all_:,} rows of {t}" for t, (n, all_) in record.table_rows.items())
        text = f"{self.name}@v{self.version}: {cls}, {record.params:,} params, {grade}"
        return f"Entry({text}{''.join(rows)})"

    @property
    def metadata(self) -> Metadata:
        """The whole record."""
        return self._metadata

    @property
    def model(self) -> str:
        """What the model is called."""
        return self._metadata.model

    @property
    def fqn(self) -> str:
        """The dotted path, as torch spells it, of the module; empty for the root."""
        return self._metadata.fqn

    @property
    def cls(self) -> str:
        """`module:qualname` of the module's class."""
        return self._metadata.cls

    @property
    def version(self) -> int:
        """Version within the collection; the first is 1."""
        return self._metadata.version

    @property
    def id(self) -> str:
        """`<collection id>/<version>`."""
        return self._metadata.id

    @property
    def name(self) -> str:
        """`model/fqn`."""
        return self._metadata.name

    @property
    def source(self) -> SourceRef | None:
        """File, text and digest of the class at capture time."""
        return self._metadata.source

    @property
    def grade(self) -> Grade | None:
        """What verification found; None when it was not verified."""
        return self._metadata.grade


class Entry(_Recorded):
    """A version of one module of one model; made by `Repo`.

    Args:
        store: Where it is.
        metadata: Its record.
        allow: Packages whose classes may be imported besides its own.
    """

    # ---- live

    def rebuild(
        self,
        device: str = "cpu",
        *,
        call: int = 0,
        strategy: str | None = None,
        class_map: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """The module alone, in the state and modes it had when that call was entered.

        Warns where its code is not what ran at the capture, and names both places. Rows of an
        embedding table that were not kept (`metadata.table_rows`) are zeros.

        Args:
            device: Where it is made.
            call: The call whose entry state is wanted.
            strategy: "init" (constructor) or "structure"; None: the one that verification chose.
            class_map: Class path -> class, for classes that were moved or renamed.

        Raises:
            ClassNotFound: Its class cannot be imported here.
            NotRebuildable: With the reason.
            Corrupted: Its bytes are not what was stored.
            EnvironmentLacks: There is no such device here.
        """
        if strategy not in (None, "init", "structure"):
            raise UsageError(f"strategy {strategy!r}: use 'init' or 'structure'")
        from modulelens.verify import drift_warnings

        chosen: Any = strategy
        replay = self._replay(device, class_map)
        module = replay.module(call, chosen)
        for text in drift_warnings(replay):
            warnings.warn(f"{self.name}: {text}", stacklevel=2)
        return module

    def inputs(
        self, call: int = 0, seed: int = 0, device: str = "cpu"
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of one call, in memory of their own, with strides and aliasing.

        Tensors of which only shapes were kept are synthesised, deterministic by `seed`.
        """
        return self._replay(device).inputs(call, seed)

    def outputs(self, call: int = 0) -> Any:
        """The captured output of one call.

        Raises:
            NotRebuildable: Only its shape was kept.
        """
        replay = self._replay()
        return replay.value(replay.call(call).output)

    def grads(self, call: int = 0) -> dict[str, dict[str, torch.Tensor]]:
        """Captured gradients: `{"outputs": ..., "inputs": ..., "parameters": ...}`.

        Outputs and inputs by leaf number in the order of `tree.flatten`; those of inputs are
        totals over all consumers. Those of parameters are sums over all calls of the step.

        Raises:
            NotFound: The trace did not keep gradients.
        """
        replay = self._replay()
        record = replay.call(call)
        groups = {
            "outputs": record.grad_output,
            "inputs": record.grad_input,
            "parameters": self.metadata.param_grads,
        }
        if not any(groups.values()):
            raise NotFound(
                f"{self.name} holds no gradients", hint="trace with keep=ml.Keep(grads=True)"
            )
        return {
            group: {name: replay.gradient(part) for name, part in parts.items()}
            for group, parts in groups.items()
        }

    def run(self, module: Callable[..., Any] | None = None, call: int = 0, seed: int = 0) -> Any:
        """Runs a module (the rebuilt one by default) on the inputs, under the captured context.

        The process's random streams and switches are the same afterwards as before.
        """
        ready = self._replay().ready(call, seed=seed)
        run = ready.run
        if module is not None:
            run = self._replay().run(module, call, (run.args, run.kwargs))
        with run:
            run.fresh()
            return run.forward()

    def check(
        self,
        candidate: Candidate = None,
        call: int | None = None,
        backward: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Check:
        """Does the rebuilt module, or a candidate, compute what was captured?

        Args:
            candidate: None: the module with today's code. An `nn.Module` or a callable: run as it
                is on the inputs (a function whose first parameter is `module` gets the rebuilt
                module). An `nn.Module` class: takes the captured class's place. `"file.py:Name"`:
                loaded in an isolated worker.
            call: One call; None: all.
            backward: Compare gradients as well.
            timeout_s: Limit in the worker, 300 s by default. Given without a candidate, the module
                is checked in a worker as well: it may crash or hang.
        """
        if isinstance(candidate, str) or (candidate is None and timeout_s is not None):
            with self._apart(candidate, call, backward, timeout_s or _CHECK_TIMEOUT_S) as apart:
                return apart.check()
        return self._check_here(candidate, call, backward)

    def _check_here(self, candidate: Candidate, call: int | None, backward: bool) -> Check:
        from modulelens.verify import check, subject_of

        return check(subject_of(self._replay, candidate), call=call, backward=backward)

    def watch(
        self,
        candidate: str | None = None,
        call: int | None = None,
        backward: bool = False,
        *,
        timeout_s: float = _WATCH_TIMEOUT_S,
        started: Callable[[tuple[str, ...]], None] | None = None,
    ) -> Generator[Check, None, None]:
        """The edit loop: a verdict now, and one after each edit. Endless; `close()` it.

        Watched are the files of the user's that the code is imported from, and the candidate's.
        Each verdict is that of a new process; `changed` and `after_save_s` tell of the edit.

        Args:
            candidate: None: the module with today's code. `"file.py:Name"`: as for `check`.
            call: One call; None: all.
            backward: Compare gradients as well.
            timeout_s: Limit of one check. An edit meanwhile ends it, and the next one begins.
            started: Called with the files that changed whenever a check begins.

        Raises:
            NotFound: There is no such candidate at the start; later that is a verdict.
        """
        from modulelens.measure.apart import watch

        source = self.source.file if self.source else ""
        paths = [source, self.metadata.main_file, (candidate or "").rpartition(":")[0]]
        watched = [os.path.abspath(path) for path in paths if path]  # noqa: PTH100 - as below
        with self._apart(candidate, call, backward, timeout_s) as apart:
            yield from watch(apart, watched, started or (lambda _changed: None))

    def _apart(
        self, candidate: str | None, call: int | None, backward: bool, timeout_s: float
    ) -> Apart:
        from modulelens.measure.apart import Apart

        task = {"call": call, "backward": backward, "candidate": candidate}
        return Apart(task | self._address(), path=_import_path(), timeout_s=timeout_s)

    def _address(self) -> dict[str, Any]:
        self._store.complete(self.id)
        return {"repo": str(self._store.root), "entry": self.id, "allow": list(self._allow)}

    def benchmark(
        self,
        candidate: Candidate = None,
        backward: bool = True,
        *,
        call: int = 0,
        seed: int = 0,
        budget_s: float = 3.0,
        device: str = "cpu",
    ) -> Measurement | Comparison:
        """Times the module, or it and a candidate in interleaved blocks.

        State, random streams and inputs are put back before each run, outside the timed part.

        Args:
            candidate: As for `check`; one of a file is checked in a worker, then loaded here.
            backward: Time forward and backward, where the output requires grad.
            call: Whose inputs.
            seed: For inputs that are synthesised.
            budget_s: Seconds to spend at most, per side.
            device: Where it runs.

        Returns:
            A `Measurement` (raw times in seconds), or a `Comparison` with a candidate.

        Raises:
            UsageError: `budget_s` is not above 0.
            CheckFailed: The candidate failed; nothing was timed.
        """
        from modulelens.speed import measure, refuse_broken
        from modulelens.verify import subject_of

        if not budget_s > 0:
            raise UsageError(f"a budget of {budget_s} s", hint="use seconds above 0, such as 3")
        if isinstance(candidate, str):
            refuse_broken(self.check(candidate, call=call, backward=backward))
        subject = subject_of(functools.partial(self._replay, device), candidate)
        measured = measure(subject, call=call, seed=seed, backward=backward, budget_s=budget_s)
        if isinstance(measured, Measurement):
            self._note(measurement=measured)
        return measured

    def profile(
        self,
        *,
        call: int = 0,
        seed: int = 0,
        device: str = "cpu",
        trace_file: str | None = None,
        budget_s: float = 2.0,
    ) -> Profile:
        """Latency forward and backward, FLOPs, memory, operators.

        Args:
            call: Whose inputs.
            seed: For inputs that are synthesised.
            device: Where it runs.
            trace_file: Also writes a Chrome trace there (chrome://tracing, Perfetto).
            budget_s: Seconds to spend at most on timing.
        """
        import msgspec

        from modulelens.measure.profile import profile

        ready = self._replay(device).ready(call, seed=seed)
        found = profile(ready.run, trace_file=trace_file, budget_s=budget_s)
        found = msgspec.structs.replace(found, synthesized=bool(ready.synthesized))
        self._note(profile=found)
        return found

    def export(self, path: str | Path) -> Path:
        """Writes one self-contained file that plain torch opens.

        `torch.load(path, weights_only=True, mmap=True)` gives a flat `{key: tensor}`:
        `state/<name>` (parameters and buffers), `inputs/<call>/<leaf>`, `outputs/<call>/<leaf>`,
        and `metadata.json` (uint8). What was synthesised is under `synthesised/` in front of that.
        """
        from modulelens.export import export

        return export(self._replay(), Path(path))

    def diff(self, other: Entry) -> EntryDiff:
        """What differs between this entry and another, by their records.

        Raises:
            UsageError: `other` is no entry.
        """
        if not isinstance(other, Entry):
            raise UsageError(f"diff with {other!r:.100}, which is no entry", hint="use repo[ref]")
        from modulelens.report.diff import entry_diff

        return entry_diff(self.metadata, other.metadata)

    # ---- inside

    def _note(self, **fields: Any) -> None:
        """Keeps a result with the entry, so that it can be searched; a read-only repo is fine."""
        if self._store.writable:
            self._change(lambda _: fields)

    def _change(self, fields: Callable[[Metadata], dict[str, Any]]) -> None:
        """Replaces fields of the stored record, given the record as it is by now."""
        from msgspec.structs import replace

        self._metadata = self._store.update(self.id, lambda m: replace(m, **fields(m)))

    def _replay(self, device: str = "cpu", class_map: Mapping[str, Any] | None = None) -> Replay:
        from modulelens.replay import Replay
        from modulelens.stored import payload_of

        self._store.complete(self.id)
        payload, roots = payload_of(self._store, self.metadata), [self._store.root]
        return Replay(
            payload, device=device, allow=self._allow, class_map=class_map, refuse_roots=roots
        )


def _import_path() -> list[str]:
    import sys

    # The worker imports what this process can, also from the script's own folder.
    return [os.path.abspath(p or ".") for p in sys.path]  # noqa: PTH100 - resolve() follows links
