"""The machine, the software and the repository of this process -> `Environment`.

Reads what is loaded already: it imports no torch and starts no device.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import sysconfig
import uuid
from pathlib import Path
from typing import Any

from modulelens.records import Environment

_GIT_TIMEOUT_S = 5.0
_PLACES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in _PLACES),
    f"{Path(__file__).parent}{os.sep}",
)


def read_environment() -> Environment:
    """The environment now. What cannot change within a process is read once."""
    cwd = str(Path.cwd())
    commit, dirty, root = _git(cwd)
    rank, world_size = rank_and_world()
    return Environment(
        python=platform.python_version(),
        torch=_version("torch"),
        platform=platform.platform(),
        cpu=cpu_name(),
        devices=_devices(),
        packages=_packages(),
        git_commit=commit,
        git_dirty=dirty,
        git_root=root,
        command=tuple(sys.argv),
        cwd=cwd,
        hostname=socket.gethostname(),
        rank=rank,
        world_size=world_size,
        job=_job(),
        run=_wandb_run(),
    )


@functools.cache
def cpu_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> tuple[str, ...]:
    """Names of the CUDA devices, where this process uses CUDA already."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _packages() -> dict[str, str]:
    """Versions of the top-level packages that are loaded and are not Python's own."""
    loaded = sorted(name for name in list(sys.modules) if "." not in name)
    foreign = [n for n in loaded if n not in sys.stdlib_module_names and not n.startswith("_")]
    versions = {name: _version(name) for name in foreign}
    return {name: version for name, version in versions.items() if version}


@functools.cache
def _version(name: str) -> str:
    """By the distribution of the same name, else what the module says of itself, else nothing."""
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        own = getattr(sys.modules.get(name), "__version__", "")
        return str(own) if isinstance(own, str) else ""  # torch gives a subclass of str


@functools.cache
def _git(folder: str) -> tuple[str, bool, str]:
    """Commit, whether tracked files differ from it, and top folder; empty outside a repository."""
    head = _run_git(folder, "rev-parse", "--show-toplevel", "HEAD").split("\n")
    if len(head) < 2:
        return "", False, ""
    dirty = bool(_run_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return head[1], dirty, head[0]


def _run_git(folder: str, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # status must not write to the index
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def rank_and_world() -> tuple[int, int]:
    """Rank and world size: of the process group, else as `torchrun` sets them in numbers."""
    if (distributed := _with_group()) is not None:
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() else 0, int(world) if world.isdecimal() else 1


def _with_group() -> Any:
    """`torch.distributed`, where a process group is there."""
    found = sys.modules.get("torch.distributed")
    there = found is not None and found.is_available() and found.is_initialized()
    return found if there else None


def _job() -> str:
    """A name that all ranks of the process group agree on, through its key-value store.

    No rank waits for another one.
    """
    if (distributed := _with_group()) is None:
        return ""
    try:
        store = distributed.distributed_c10d._get_default_store()
        return str(store.compare_set("modulelens/job", "", uuid.uuid4().hex[:12]).decode())
    except Exception:  # noqa: BLE001 - boundary: a store of any kind, whose server may be gone
        return ""


def _wandb_run() -> str:
    """The Weights & Biases run that this process logs to, "entity/project/id"."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return str(getattr(run, "path", "")) if run is not None else ""


def moment() -> int:
    """How many collectives this process has begun, in all of its groups: where a job is.

    Ranks that hold parts of one module begin the same ones, so this is equal on them at one step.
    """
    if (distributed := _with_group()) is None:
        return 0
    try:
        groups = distributed.distributed_c10d._world.pg_map
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except Exception:  # noqa: BLE001 - boundary: backends that count nothing
        return 0


def is_own(path: str) -> bool:
    """Whether a file or folder is the user's: not Python's, of an installed package, or ours."""
    packages = {"site-packages", "dist-packages"}
    return not (path.startswith(("<", *_INSTALLED)) or packages & {*Path(path).parts})
