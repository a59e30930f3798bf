"""Short ways to do with the wandb SDK what the contract tests do again and again."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.wandb_server.serving import Server

# The SDK shares a small dict between these calls, and isn't safe in threads there.
LOCK = threading.Lock()


@contextmanager
def sdk_leaks() -> Iterator[None]:
    """Inside, the SDK may leave files open, as it does when a download breaks off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def another_run(entity: str, project: str, **settings: Any) -> Any:
    """A run beside those that are open, which `wandb.init` alone would finish."""
    import wandb

    options = wandb.Settings(reinit="create_new", **settings)
    return wandb.init(entity=entity, project=project, settings=options)


def draft(folder: Path, name: str, files: dict[str, bytes], **meta: Any) -> Any:
    """An artifact that holds `files` and `meta` and was not logged."""
    import wandb

    with LOCK:
        made = wandb.Artifact(name, type="module", metadata=meta)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
        made.add_file(str(folder / file), policy="immutable", skip_cache=True)
    return made


def log(run: Any, folder: Path, name: str, files: dict[str, bytes], **meta: Any) -> Any:
    """A logged artifact, committed when this returns."""
    made = draft(folder, name, files, **meta)
    run.log_artifact(made)
    made.wait(timeout=20)
    return made


def registry(api: Any, server: Server, name: str) -> str:
    """Creates a registry that takes modules; its name in the paths of links."""
    made = api.create_registry(
        name=name, organization=server.org, visibility="organization", artifact_types=["module"]
    )
    return str(made.full_name)
