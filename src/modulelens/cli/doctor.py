"""`modulelens doctor`: what is installed, how the repo is, and what this machine can run.

The first part reads package metadata. The second runs in a process of its own: torch may take
seconds to import, or crash, and doctor has to survive that.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from modulelens.cli.command import REPO, Command, Option, Reply
from modulelens.cli.repos import open_repo, repo_place
from modulelens.errors import EnvironmentLacks, ModuleLensError
from modulelens.report.quantity import plural
from modulelens.report.table import clean_block, indent, pairs

REQUIRED = ("torch", "numpy", "msgspec", "typer", "rich", "blake3")
OPTIONAL = {
    "wandb": "remote repos; pip install 'modulelens[wandb]'",
    "anywidget": "the notebook widget; pip install 'modulelens[jupyter]'",
    "mcp": "the agent server; pip install 'modulelens[mcp]'",
    "torchrec": "sharded embedding models",
    "transformers": "",
}

_PROBE = """
import json, shutil, sys
import torch

def works(device):
    try:
        x = torch.randn(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()
        return "ok"
    except RuntimeError as error:
        return str(error).splitlines()[0]

devices = {"cpu": works("cpu")}
for i in range(torch.cuda.device_count()):
    devices[f"cuda:{i} {torch.cuda.get_device_name(i)}"] = works(f"cuda:{i}")
if torch.backends.mps.is_available():
    devices["mps"] = works("mps")
print(json.dumps({
    "version": torch.__version__,
    "devices": devices,
    "num_threads": torch.get_num_threads(),
    "compiler": shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or "",
}))
"""
_PROBE_TIMEOUT_S = 180


class TorchHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What torch can do here: per device "ok" or the error of a small backward."""

    version: str = ""
    devices: dict[str, str] = {}
    num_threads: int = 0
    compiler: str = ""
    error: str = ""


class RepoHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The repo that a command without `--repo` would use; `error` is empty where it is fine."""

    path: str
    entries: int = 0
    error: str = ""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Versions (empty: not installed), the repo, and torch where it was asked."""

    modulelens: str
    python: str
    executable: str
    platform: str
    required: dict[str, str]
    optional: dict[str, str]
    repo: RepoHealth
    torch: TorchHealth | None = None


def run(*, repo: str | None, quick: bool) -> Reply:
    """Looks at everything; a required package that is missing is exit code 5."""
    health = Health(
        modulelens=_version("modulelens"),
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        required={name: _version(name) for name in REQUIRED},
        optional={name: _version(name) for name in OPTIONAL},
        repo=_repo_health(repo),
        torch=None if quick else _torch_health(),
    )
    lacking = [name for name, version in health.required.items() if not version]
    broken = health.torch.error if health.torch else ""
    failure = None
    if lacking or broken:
        message = f"missing: {', '.join(lacking)}" if lacking else f"torch does not run: {broken}"
        failure = EnvironmentLacks(message, hint="pip install --upgrade modulelens")
    return Reply(health, _report(health), next=["modulelens demo"], failure=failure)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _repo_health(path: str | None) -> RepoHealth:
    place = repo_place(path)
    if "://" not in place and not Path(place).exists():
        return RepoHealth(path=place, error="not there yet; the first `modulelens trace` makes it")
    try:
        return RepoHealth(path=place, entries=open_repo(path).count({}))
    except ModuleLensError as error:
        return RepoHealth(path=place, error=error.message)


def _torch_health() -> TorchHealth:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchHealth(error=f"no answer within {_PROBE_TIMEOUT_S} s")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return TorchHealth(error=last[0])
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchHealth)


def _report(health: Health) -> str:
    missing = "missing"
    repo = health.repo
    parts = [
        pairs(
            [
                ("modulelens", health.modulelens),
                ("python", f"{health.python} at {health.executable}"),
                ("platform", health.platform),
                ("repo", f"{repo.path}: {repo.error or plural(repo.entries, 'entry')}"),
            ]
        ),
        "packages",
        indent(pairs([(name, text or missing) for name, text in health.required.items()])),
        "optional packages",
        indent(
            pairs(
                [
                    (name, text or f"{missing}{'; ' * bool(OPTIONAL[name])}{OPTIONAL[name]}")
                    for name, text in health.optional.items()
                ]
            )
        ),
    ]
    if health.torch is not None:
        parts += ["devices", indent(_devices(health.torch))]
    return "\n".join(parts)


def _devices(torch: TorchHealth) -> str:
    if torch.error:
        return clean_block(f"torch does not run: {torch.error}")
    compiler = torch.compiler or "none found; torch.compile on CPU needs one"
    rows = [*torch.devices.items(), ("threads", str(torch.num_threads)), ("C++", compiler)]
    return pairs(rows)


COMMAND = Command(
    run,
    "Report versions, repo, optional packages, devices.",
    "modulelens doctor --json",
    Health,
    options=(REPO, Option("--quick", bool, "Leave out the devices, which need torch.")),
)
