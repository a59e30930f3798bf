"""A small repo to attack, and every public way of reading it, run in a process that is watched.

Knows what the right answers are: those before the attack. The process has little memory and time,
and whatever it runs or writes that it should not is noted.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import io
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import modulelens as ml
from modulelens.cli import main
from modulelens.errors import ModuleLensError, RepoError

_SPARE_BYTES = 1 << 30
_MOST_S = 30
_RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")
_RUNS += ("socket.connect", "socket.bind", "urllib.Request", "webbrowser.open", "os.startfile")
_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink")
_WRITES += ("os.truncate", "os.chown", "shutil.rmtree", "shutil.copyfile", "shutil.move")
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Colour(enum.Enum):
    """A choice."""

    RED = "red"


@dataclass
class Settings:
    """What a model is made from."""

    width: int = 4
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    extra: dict[str, Any] = field(default_factory=dict)


class Gate(nn.Module):
    """Holds one value of many kinds, and a child with a buffer."""

    def __init__(self, settings: Settings, act: Callable[..., Any]) -> None:
        super().__init__()
        self.settings = settings
        self.act = act
        self.linear = nn.Linear(settings.width, settings.width)
        self.norm = nn.BatchNorm1d(settings.width)
        self.scale = nn.Parameter(torch.ones(settings.width))
        self.table = np.arange(6.0).reshape(2, 3)
        self.order = OrderedDict(x=1, y=(2, None), z={"deep": [1, {"k": torch.float16}]})
        self.colour = Colour.RED
        self.path = Path("a/b")
        self.sparse = torch.eye(3).to_sparse()

    def forward(self, rows: torch.Tensor, *, mask: torch.Tensor | None = None) -> dict[str, Any]:
        out = self.norm(self.act(self.linear(rows))) * self.scale
        return {"out": out, "kept": mask, "note": ("text", 3)}


def build(root: Path) -> ml.Repo:
    """Two entries to attack (net and net/linear), later ones, and one of another model (good)."""
    torch.manual_seed(0)
    with ml.track_init():
        model = Gate(Settings(extra={"k": (1, 2.5)}), functools.partial(nn.functional.gelu))
    repo = ml.Repo(root)
    for modules in (["", "linear"], [""]):
        with ml.trace(model, name="net", modules=modules, keep=ml.Keep(grads=True)) as trace:
            out = model(torch.randn(3, 4), mask=torch.ones(3, dtype=torch.bool))
            out["out"].sum().backward()
        repo.add(trace, verify=False, aliases=["last"])
    good = nn.Linear(2, 2)
    with ml.trace(good, name="good", keep=ml.Keep(grads=True)) as trace:
        good(torch.randn(2, 2)).sum().backward()
    repo.add(trace, verify=False)
    repo._store.close()
    return repo


@dataclass
class Seen:
    """What a reader of an attacked repo met, by the name of the way it took."""

    #: A digest of the answer, in lower case, or the code of the error. A name that begins with
    #: `list` has a right answer that depends on the damage; with `good`, one that doesn't.
    answers: dict[str, str]
    bare: dict[str, str]  # errors that are not ModuleLens' own, with their traceback
    broken: list[str]  # what was run, or written outside
    status: int = 0


class _Watch:
    """Notes what the process runs, and what it writes outside of the folders it may write to."""

    def __init__(self, *allowed: Path) -> None:
        self.allowed = [str(path.resolve()) for path in allowed]
        self.found: list[str] = []
        self.armed = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event.startswith(_RUNS):
            self.found.append(f"{event} {args!r:.200}")
        elif event in _WRITES or (event == "open" and (args[2] or 0) & _FLAGS):
            self.armed = False
            try:
                self._look(event, args)
            finally:
                self.armed = True

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        folder = args[-1] if event != "open" and isinstance(args[-1], int) else -1
        base = f"/proc/self/fd/{folder}" if folder >= 0 else ""
        for arg in args[: 1 if event == "open" else 2]:
            if isinstance(arg, (str, bytes, os.PathLike)) and arg and arg != os.devnull:
                place = os.path.join(base, os.fsdecode(arg))  # noqa: PTH118
                # What removes or renames a link does not follow it.
                head, tail = (place, "") if event == "open" else os.path.split(place)
                place = os.path.join(os.path.realpath(head), tail).rstrip("/")  # noqa: PTH118
                if not any(place == a or place.startswith(f"{a}/") for a in self.allowed):
                    self.found.append(f"{event} {place}")


def read_all(root: Path, out: Path, only: str = "") -> Seen:
    """Everything that a reader can ask of the repo, in a process of its own."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.close(read)
            seen = _in_child(root, out, only)
            with os.fdopen(write, "w") as pipe:
                json.dump([seen.answers, seen.bare, seen.broken], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = json.loads(text) if text else [{}, {}, []]
    return Seen(*found, status=status if text else status or 1)


def warm_up(root: Path, out: Path) -> None:
    """Imports all that reading imports: what a child imports is lost with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ask in _questions(root, out).values():
            with contextlib.suppress(ModuleLensError):
                ask()


def _in_child(root: Path, out: Path, only: str) -> Seen:
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    signal.alarm(_MOST_S)  # ends the process: an endless loop is a finding too
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES,) * 2)
    watch = _Watch(root, out)
    sys.addaudithook(watch)
    seen = Seen({}, {}, watch.found)
    warnings.simplefilter("ignore")
    watch.armed = True
    for name, ask in _questions(root, out).items():
        if only in name:
            _ask(seen, name, ask)
    watch.armed = False
    return seen


def _ask(seen: Seen, name: str, ask: Callable[[], Any]) -> None:
    try:
        seen.answers[name] = _digest(ask())
    except ModuleLensError as error:
        seen.answers[name] = error.code
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        places = {f"{f.filename[-14:]}:{f.name}" for f in traceback.extract_tb(error.__traceback__)}
        if name.endswith(" run") and "measure/run.py:forward" in places:
            seen.answers[name] = "FOREIGN"  # what a module's own forward raises is handed on
            return
        seen.answers[name] = "BARE"
        seen.bare[name] = "".join(traceback.format_exception(error))[-3000:]


def _digest(answer: Any) -> str:
    return hashlib.blake2b(_text(answer).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if (
            plain.numel() > 10**7
            or plain.device.type == "meta"
            or plain.layout is not torch.strided
        ):
            return f"{plain.layout} {plain.shape}"
        bits = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{plain.dtype} {plain.shape} {bits!r}"
    if isinstance(value, nn.Module):
        named = [*value.named_parameters(), *value.named_buffers()]
        return f"{type(value)} {value.training} {[(n, _text(t)) for n, t in named]}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


#: References of the entries that are attacked, and of the one that is not.
ATTACKED = ("net@v1", "net/linear@v1")
GOOD = "good"


def _questions(root: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """Name -> question. Those that change the repo come last."""

    def of_good(found: list[Any]) -> list[Any]:
        return [entry for entry in found if entry.name == GOOD]

    asked: dict[str, Callable[[], Any]] = {
        "good rows": lambda: of_good(ml.Repo(root).rows()),
        "good find": lambda: of_good(ml.Repo(root).find({"params": {"$gt": 1}})),
        "good find text": lambda: of_good(ml.Repo(root).rows({"cls": {"$regex": "Linear$"}})),
        "list len": lambda: len(ml.Repo(root)),
        "list cli ls": lambda: _cli("ls", "--repo", str(root)),
        "list cli ls json": lambda: _cli("ls", "--json", "--repo", str(root)),
    }
    for ref in (*ATTACKED, GOOD):
        asked |= {f"{ref} {name}": ask for name, ask in _about(root, ref, out).items()}
    asked |= {
        "diff": lambda: repr(ml.Repo(root)["net@v1"].diff(ml.Repo(root)["net@v2"])),
        "cli diff": lambda: _cli("diff", "net@v1", "net@v2", "--repo", str(root)),
        "list fsck": lambda: [p.code for p in ml.Repo(root).fsck().problems],
        "list cli fsck": lambda: _cli("fsck", "--repo", str(root)),
        "list cli fsck json": lambda: _cli("fsck", "--json", "--repo", str(root)),
        "aliases": lambda: ml.Repo(root).aliases("net@v2"),
        "alias": lambda: ml.Repo(root)["net@last"].id,
        "set alias": lambda: ml.Repo(root).alias("net@v1", "other"),
        "list reindex": lambda: ml.Repo(root).reindex(),
        "good rows again": lambda: of_good(ml.Repo(root).rows()),
        "list gc": lambda: ml.Repo(root).gc().removed_blobs,
        "good after gc": lambda: ml.Repo(root)[GOOD].outputs(),
        "tag": lambda: ml.Repo(root).tag("net@v1", "t").id,
        "list fsck again": lambda: ml.Repo(root).fsck().ok,
        "remove": lambda: ml.Repo(root).remove("net/linear@v1", force=True),
    }
    return asked


def _about(root: Path, ref: str, out: Path) -> dict[str, Callable[[], Any]]:
    def entry() -> ml.Entry:
        return ml.Repo(root)[ref]

    return {
        "record": lambda: repr(entry().metadata),
        "repr": lambda: repr(entry()),
        "source": lambda: entry().source,
        "show": lambda: _cli("show", ref, "--repo", str(root)),
        "show json": lambda: _cli("show", ref, "--json", "--repo", str(root)),
        "show source": lambda: _cli("show", ref, "--source", "--repo", str(root)),
        "versions": lambda: [found.id for found in ml.Repo(root).versions(ref)],
        "inputs": lambda: entry().inputs(),
        "outputs": lambda: entry().outputs(),
        "grads": lambda: entry().grads(),
        "structure": lambda: entry().rebuild(strategy="structure"),
        "init": lambda: entry().rebuild(strategy="init"),
        "run": lambda: entry().run(),
        "check": lambda: entry().check(backward=True).status,
        "export": lambda: torch.load(entry().export(out / "x.pt"), weights_only=True).keys(),
    }


def _cli(*words: str) -> str:
    """What a command prints; a traceback means that an error had no name."""
    printed, noted = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(noted):
        code = main(list(words))
    if "Traceback" in noted.getvalue() or '"INTERNAL"' in printed.getvalue():
        raise AssertionError(noted.getvalue() or printed.getvalue())
    if code:
        raise RepoError(f"exit code {code}")
    return printed.getvalue().replace(str(words[-1]), "REPO")
