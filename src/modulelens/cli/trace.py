"""`modulelens trace`: captures modules of an unchanged training script and stores them."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from modulelens.cli.command import REPO, Argument, Command, Option, Reply
from modulelens.cli.progress import progress
from modulelens.cli.repos import open_repo, with_repo
from modulelens.errors import DiskFull, ForeignError, ModuleLensError, UsageError
from modulelens.records import Coverage, Fate
from modulelens.report.coverage import coverage_report
from modulelens.report.quantity import plural

if TYPE_CHECKING:
    from modulelens.cli.script import ScriptOptions

_MOST_ENTRIES = 20


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """What one trace stored in `repo`. `entries` are the first names; `missed` is not recorded."""

    repo: str
    model: str
    stored: int
    entries: tuple[str, ...]
    grades: dict[str, int]
    missed: tuple[Coverage, ...]


def run(
    *, script: list[str], repo: str | None, no_verify: bool, ranks: str, **wishes: Any
) -> Reply:
    """Runs the script in this process until its step is traced and it ends, then stores.

    Of a job of several ranks each ends as it would untraced: others may wait for it.
    """
    from modulelens.cli.script import check_script, run_untraced, world_size

    options = _options(**wishes)
    check_script(script[0], options.as_module)  # on all ranks: none runs without the others
    if not _is_chosen(ranks):
        run_untraced(script[0], script[1:], as_module=options.as_module)
        return Reply(_nothing(), "")
    try:
        return _traced(script, repo, no_verify, options)
    except ForeignError:
        raise
    except Exception as error:
        if world_size() == 1:
            raise
        if not isinstance(error, ModuleLensError):
            traceback.print_exc()
        done = "could not store all" if isinstance(error, DiskFull) else "stored nothing"
        text = f"rank {os.environ.get('RANK')} {done}: {error}"
        return Reply(_nothing(), "", warnings=[text])


def _nothing() -> Traced:
    return Traced(repo="", model="", stored=0, entries=(), grades={}, missed=())


def _is_chosen(ranks: str) -> bool:
    """Whether this process is one of the ranks that trace."""
    words = ranks.split(",")
    if ranks != "all" and not all(word.strip().isdigit() for word in words):
        raise UsageError(f"--ranks {ranks}: use all, or numbers such as 0,1")
    rank = os.environ.get("RANK")
    return rank is None or ranks == "all" or int(rank) in map(int, words)


def _traced(script: list[str], repo: str | None, no_verify: bool, options: ScriptOptions) -> Reply:
    from modulelens.cli.script import run_untraced, trace_script, world_size

    # First: the script may take long, and change the folder.
    try:
        store = open_repo(repo, create=True)
    except ModuleLensError:
        if world_size() > 1:
            with _of_script():
                run_untraced(script[0], script[1:], as_module=options.as_module)
        raise
    trace = trace_script(script[0], script[1:], options)
    failed = trace.failure is not None and world_size() > 1  # others wait for this process to end
    with progress("storing") as advance:
        entries = store.add(trace, verify=not (no_verify or failed), progress=advance)
    names = [f"{entry.name}@v{entry.version}" for entry in entries]
    grades = Counter(str(entry.grade) if entry.grade else "unverified" for entry in entries)
    data = Traced(
        repo=str(store.root),
        model=trace.name,
        stored=len(names),
        entries=tuple(names[:_MOST_ENTRIES]),
        grades=dict(grades),
        missed=tuple(c for c in trace.coverage if c.fate is not Fate.RECORDED)[:_MOST_ENTRIES],
    )
    counts = ", ".join(f"{number} {grade}" for grade, number in grades.items())
    stored = f"stored {plural(len(names), 'entry')} in {store.root}: {counts}"
    text = f"{coverage_report(trace.coverage)}\n{stored}"
    next_commands = [with_repo(f"show {names[0]}", repo)] if names else []
    failure = ForeignError(trace.warnings[-1]) if failed else None
    return Reply(data, text, next=next_commands, warnings=trace.warnings, failure=failure)


@contextmanager
def _of_script() -> Iterator[None]:
    """What the script raises ends this process as it would untraced, whatever else went wrong."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(1) from error


def _options(*, m: bool, modules: list[str], keep: str, grads: bool, **more: Any) -> ScriptOptions:
    if keep not in ("full", "shape"):
        raise UsageError(f"--keep {keep}: use full or shape")
    from modulelens.capture import Keep
    from modulelens.cli.script import ScriptOptions

    content: Any = keep
    return ScriptOptions(
        modules=tuple(modules) or ("*",),
        keep=Keep(tensors=content, weights=content, grads=grads),
        as_module=m,
        **more,
    )


COMMAND = Command(
    run,
    "Run a training script, capture modules of one step.",
    "modulelens trace --modules 'layers.*' --warmup 2 -- train.py --epochs 1",
    Traced,
    arguments=(Argument("script", "The script and its arguments.", many=True),),
    options=(
        Option("--modules", str, "Globs over fqns or class names.", many=True, metavar="GLOB"),
        Option("--methods", str, "Methods to record besides forward.", many=True, metavar="NAME"),
        Option("--model", str, "Class of the model to trace; else the largest.", metavar="CLASS"),
        Option("--name", str, "What to call the model; else its class.", metavar="NAME"),
        Option("--steps", int, "Steps to capture.", 1, metavar="N"),
        Option("--ranks", str, "Ranks that trace: all, or numbers (0,1).", "0", metavar="RANKS"),
        Option("--warmup", int, "Steps to let pass first.", 1, metavar="N"),
        Option("--keep", str, "Tensors and weights: full, or shape only.", "full", metavar="WHAT"),
        Option("--grads", bool, "Keep gradients, so that backward is checked."),
        Option("--no-verify", bool, "Store without replaying and grading."),
        Option("-m", bool, "The script is a module name, as in python -m."),
        REPO,
    ),
    rest=True,
)
