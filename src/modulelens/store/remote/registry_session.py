"""The W&B SDK behind a narrow door: connect, upload, list, download. The only file that imports it.

Knows no modules. Downloads go by the files' own URLs: the SDK's check nothing, fill a cache, and
write to one another's paths.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modulelens.errors import (
    Corrupted,
    EnvironmentLacks,
    ModuleLensError,
    NotFound,
    PermissionDenied,
    Unavailable,
    UsageError,
)
from modulelens.store.files import space_for
from modulelens.store.remote.spread import spread

_LOCK = threading.RLock()
INIT_S, CALL_S, TRIES, PAGE = 5, 20, 3, 100
#: What an upload or a download must at least get through, after its first minute.
_BYTES_PER_S = 256 << 10
_SPOOL = "modulelens-wandb-"
_PLACE = re.compile(r"[^/:\s]+/[^/:\s]+/[\w.-]+:v\d+", re.ASCII)
_LATER = re.compile(
    r"in time|timed? ?out|connect|not running|temporar|too many requests|rate limit"
    r"|remaining uploads|ended prematurely|IncompleteRead|unexpected EOF|no such host|giving up"
    r"|teardown",
    re.IGNORECASE,
)
_DENIED = re.compile(r"permission|not allowed|read.?only|forbidden|not logged in|api.?key", re.I)
_ABSENT = re.compile(r"not found|does not exist|unable to fetch (files|source)", re.IGNORECASE)
_NETWORK = (ConnectionError, TimeoutError)
_ROLE = "check WANDB_API_KEY, and your role in the team and in the registry"


@contextmanager
def sdk(what: str) -> Iterator[None]:
    """Holds the one lock of the process, and names errors: `what` was wanted.

    Whatever makes an artifact needs the lock: the SDK keeps them in a shared dict that threads
    break.
    """
    with _LOCK, named(what):
        yield


@contextmanager
def named(what: str) -> Iterator[None]:
    """Lets what the SDK raises out as one of ours."""
    try:
        yield
    except (ModuleLensError, AttributeError, KeyError, NameError, TypeError):
        raise  # a bug looks like one
    except Exception as error:  # boundary: each layer of the SDK raises its own
        if isinstance(error, OSError) and error.errno and not isinstance(error, _NETWORK):
            raise  # a matter of this machine
        if "did not respond in time" in str(error):
            # The helper still answers that it gave up. An exit in that moment breaks its pipe
            # before it hears of the end, and it is waited for, for ten minutes.
            time.sleep(0.3)
        raise _named(what, error) from error


def _named(what: str, error: Exception) -> ModuleLensError:
    chain = list(_chain(error))
    text = str(error) or type(error).__name__
    everything = " / ".join(map(str, chain))
    told = re.search(r"returned error (\d{3})", everything)
    status = int(told[1]) if told else next(filter(None, map(status_of, chain)), 0)
    denied = status in (401, 403) or (not status and _DENIED.search(everything))
    absent = status == 404 or (not status and not denied and _ABSENT.search(everything))
    lost = _LATER.search(everything) or any(isinstance(part, OSError) for part in chain)
    if status in (408, 409, 429) or status >= 500 or (not status and not denied and lost):
        return Unavailable(f"{what}: W&B did not answer: {text}", hint="try again")
    if absent:
        return NotFound(f"{what}: W&B has no such thing: {text}")
    return PermissionDenied(f"{what}: W&B refused: {text}", hint=_ROLE)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        inner = getattr(error, "exc", None)
        error = inner if isinstance(inner, Exception) else error.__cause__


def status_of(error: BaseException | None) -> int:
    """The HTTP status of an answer that was an error, else 0."""
    reply = getattr(error, "response", None)
    status = getattr(reply, "status_code", 0) or getattr(reply, "http_status", 0)
    return status if status >= 400 else 0


class Session:
    """A connection to W&B, with one run per project that uploads.

    Args:
        entity: Whose projects hold what is uploaded; the key's own where it says none.

    Raises:
        EnvironmentLacks: The package is missing.
        PermissionDenied: There is no key, or W&B does not know it.
        Unavailable: W&B does not answer, or is switched off here.
        UsageError: The entity is in no organization, and so has no registries.
    """

    def __init__(self, entity: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise EnvironmentLacks(
                f"a Weights & Biases registry needs the package wandb: {error}",
                hint="pip install 'modulelens[wandb]'",
            ) from error
        self._wandb = wandb
        self._runs: dict[str, Any] = {}
        self.found: dict[str, Any] = {}  # artifacts by place, of the last search
        with _LOCK, _own_service():
            settings = wandb.setup().settings
            with named(f"connecting to {settings.base_url}"):
                _check_settings(settings)
                overrides = {"entity": entity} if entity else {}
                # Who is not there is waited for as long as a call may take, so first a short one.
                wandb.Api(overrides=overrides, timeout=INIT_S)
                self.api = wandb.Api(overrides=overrides, timeout=CALL_S)
                self.entity: str = entity or self.api.default_entity
                self.organization = self._organization()
        self._folder = _spool()

    def _organization(self) -> Any:
        try:
            return self.api.organization()
        except self._wandb.errors.CommError as error:
            if not isinstance(error.exc, ValueError):
                raise
            raise UsageError(
                f"{self.entity!r} has no W&B organization, and so no registry: {error}",
                hint="name a team: wandb://TEAM/REGISTRY",
            ) from error

    def upload(
        self,
        project: str,
        files: Mapping[str, Path | bytes],
        tags: Sequence[str] = (),
        **draft: Any,
    ) -> Any:
        """Logs files as a version of an artifact; returns it once it is committed.

        `draft` are name, type, description and metadata.
        """
        folder = Path(self._folder.name)
        folder.mkdir(0o700, exist_ok=True)  # it may have been swept after an idle day
        with (
            named(f"uploading {draft['name']}"),
            space_for("the record", folder, 0),
            tempfile.TemporaryDirectory(prefix="files-", dir=folder) as spool,
        ):
            nbytes = _put_in(Path(spool), files)
            for left in reversed(range(TRIES)):
                with _LOCK:
                    artifact = self._wandb.Artifact(**draft)
                for name in sorted(files):
                    path = str(Path(spool, name))
                    artifact.add_file(path, name, policy="immutable", skip_cache=True)
                try:
                    self._run(project).log_artifact(artifact, tags=list(tags))
                    return artifact.wait(timeout=60 + nbytes // _BYTES_PER_S)
                except ValueError as error:
                    # A storage that refuses once makes the SDK give up on the whole artifact.
                    if not left or "remaining uploads" not in str(error):
                        raise
        raise AssertionError("the last try returns or raises")

    def _run(self, project: str) -> Any:
        with _LOCK:
            if project not in self._runs:
                run = self._wandb.init(
                    entity=self.entity,
                    project=project,
                    dir=self._folder.name,
                    id=secrets.token_hex(4),
                    name="module-capture",
                    job_type="module-capture",
                    mode="online",
                    resume="never",
                    reinit="create_new",
                    settings=self._wandb.Settings(**_SETTINGS),
                )
                # Else the user's next `wandb.init()` would return this one.
                self._wandb.setup().remove_active_run(run)
                self._runs[project] = run
            return self._runs[project]

    def artifact(self, path: str) -> Any:
        """One version, by `entity/project/collection:alias`."""
        with sdk(path):
            return self.api.artifact(path)

    def download(
        self, place: str, names: Sequence[str], into: Path, done: Callable[[int], None]
    ) -> None:
        """Brings files of an artifact; `done` gets the size of each.

        Raises:
            NotFound: There is no such artifact.
            Corrupted: It lacks one of the files, or one came with another size.
        """
        if not _PLACE.fullmatch(place):
            raise Corrupted(f"{place!r:.100} is no place in W&B")
        files = self._files(place, names)
        for name in names:
            if name not in files:
                raise Corrupted(f"{place} has no {name!r:.100}", hint="push it again")
        spread(lambda name: done(self._bring(place, files[name], into / name)), names)

    def _files(self, place: str, names: Sequence[str]) -> dict[str, Any]:
        artifact = self.found.get(place) or self.artifact(place)
        with named(place):
            return {file.name: file for file in artifact.files(names=list(names), per_page=1000)}

    def _bring(self, place: str, file: Any, path: Path) -> int:
        import requests

        with named(f"{path.name} of {place}"), space_for(path.name, path.parent, file.size):
            for left in reversed(range(TRIES)):
                try:
                    size = _stream(file.direct_url, path, file.size)
                    break
                except requests.RequestException:
                    if not left:
                        raise
                    # Its URL may have expired.
                    file = self._files(place, [path.name]).get(path.name, file)
        if size != file.size:
            came = f"came with {size:,} of {file.size:,} bytes"
            raise Corrupted(f"{path.name} of {place} {came}", hint="try again")
        return size

    def close(self) -> None:
        """Finishes the runs, within seconds, and removes what was spooled."""
        while self._runs:
            with suppress(Unavailable), sdk("finishing the run"):  # what it logged is committed
                self._runs.popitem()[1].finish()
        self._folder.cleanup()


#: A run that tells nothing of this machine, and never holds up anybody.
_SETTINGS = {
    **dict.fromkeys(("init_timeout", "finish_timeout"), INIT_S),
    **dict.fromkeys(("program", "program_relpath", "program_abspath"), "modulelens"),
    **dict.fromkeys(("silent", "disable_git", "x_disable_stats", "x_disable_meta"), True),
    **dict.fromkeys(("save_code", "x_save_requirements"), False),
    "x_disable_machine_info": True,
    "console": "off",
}


def _check_settings(settings: Any) -> None:
    from wandb.sdk.lib import wbauth

    if settings.mode not in ("online", "shared", "run"):
        raise Unavailable(f"Weights & Biases is in {settings.mode} mode", hint="unset WANDB_MODE")
    # Without a key the SDK would prompt where there is a terminal.
    if not wbauth.authenticate_session(
        host=settings.base_url, source="modulelens", prompt=False, update_session=False
    ):
        raise PermissionDenied(f"no key for {settings.base_url}", hint="set WANDB_API_KEY")


def _put_in(spool: Path, files: Mapping[str, Path | bytes]) -> int:
    """Gives files paths that may stand in the manifest, for all to read; returns their bytes."""
    for name, source in files.items():
        if isinstance(source, bytes):
            (spool / name).write_bytes(source)
        else:
            (spool / name).symlink_to(source.resolve(strict=True))
    return sum(path.stat().st_size for path in spool.iterdir())


def _stream(url: str, path: Path, size: int) -> int:
    import requests

    deadline = time.monotonic() + 60 + size // _BYTES_PER_S
    with requests.get(url, stream=True, timeout=(10, 60)) as reply, path.open("wb") as file:
        reply.raise_for_status()
        for chunk in reply.iter_content(1 << 20):
            file.write(chunk)
            if file.tell() > size:
                break
            if time.monotonic() > deadline:
                raise requests.Timeout("it came too slowly")
        return file.tell()


@contextmanager
def _own_service() -> Iterator[None]:
    """Keeps the SDK's helper process from being shared with processes that are started later.

    A child that finds its address in the environment would upload through it, and not end with it.
    """
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        if name.startswith("WANDB_SERVICE"):
            del os.environ[name]


def _spool() -> tempfile.TemporaryDirectory[str]:
    """A new folder with a path that says nothing; those that dead processes left are removed."""
    place = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
    for old in place.glob(f"{_SPOOL}*"):
        with suppress(FileNotFoundError):  # swept by somebody else
            if old.lstat().st_uid == os.getuid() and old.lstat().st_mtime < time.time() - 86_400:
                shutil.rmtree(old, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=_SPOOL, dir=place, ignore_cleanup_errors=True)
