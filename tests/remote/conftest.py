"""The places that remotes are tested on, and what is put there.

`spot` is one place of each kind, with a fresh URL per test: a folder on disk, the memory of this
process, an object store (moto's, on loopback), and a W&B registry (the stand-in server). The rest
of a test knows the seam only.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.samples import row
from tests.store.victims import add

import modulelens as ml
from modulelens.errors import EnvironmentLacks
from modulelens.records import Metadata, collection_id
from modulelens.store import LocalStore
from modulelens.store.files import digest_of
from modulelens.store.remote import Draft, Remote, Version, open_remote
from modulelens.store.remote.pull import everything, pull
from modulelens.store.remote.push import Pushed, record_of, send

# A line per request, which pytest keeps, takes as long as the request.
logging.getLogger("werkzeug").setLevel(logging.ERROR)
NUMBERS = itertools.count(1)
S3_ENV = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class ObjectStore:
    """moto's S3 in a thread of this process. One request at a time: its conditional put is two."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        app, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

        def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
            with turn:
                return list(app(environ, start_response))

        self._app = serve
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listens; after a `stop` on the same port, with what it held."""
        from moto.server import MotoRequestHandler
        from werkzeug.serving import make_server

        self._server = make_server(
            "127.0.0.1", self.port, self._app, threaded=True, request_handler=MotoRequestHandler
        )
        self._server.daemon_threads = True
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuses connections from now on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def clients(self) -> None:
        """Lets no later client be one of before: they are kept by their arguments."""
        from s3fs import S3FileSystem

        S3FileSystem.clear_instance_cache()


@dataclass
class Spot:
    """One kind of remote.

    Attributes:
        fresh: Gives the URL of an empty remote.
        down: A context in which it does not answer; None where it cannot be down.
        denied: A context in which it lets us do nothing; None where it has no rights.
    """

    kind: str
    fresh: Callable[[], str]
    down: Callable[[], AbstractContextManager[Any]] | None = None
    denied: Callable[[], AbstractContextManager[Any]] | None = None
    opened: list[Remote] = field(default_factory=list)

    def open(self, url: str = "") -> Remote:
        """A remote, closed when the test ends."""
        self.opened.append(open_remote(url or self.fresh()))
        return self.opened[-1]


@contextmanager
def at_file(home: Path) -> Iterator[Spot]:
    @contextmanager
    def unmounted() -> Iterator[None]:
        home.rename(home.with_name("away"))
        home.write_text("where it is mounted")
        try:
            yield
        finally:
            home.unlink()
            home.with_name("away").rename(home)

    yield Spot("file", lambda: f"file://{home}/team{next(NUMBERS)}", unmounted)


@contextmanager
def at_memory(_: Path) -> Iterator[Spot]:
    from fsspec.implementations.memory import MemoryFileSystem

    yield Spot("memory", lambda: f"memory://team{next(NUMBERS)}")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@contextmanager
def at_s3(_: Path) -> Iterator[Spot]:
    import fsspec
    from moto.core.authorization import enable_iam_authentication

    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            S3_ENV | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}"}
        ).items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)

        def fresh() -> str:
            store.clients()
            bucket = f"team{next(NUMBERS)}"
            fsspec.filesystem("s3").mkdir(bucket)
            return f"s3://{bucket}/modules"

        @contextmanager
        def stopped() -> Iterator[None]:
            store.stop()
            try:
                yield
            finally:
                store.start()

        yield Spot("s3", fresh, stopped, enable_iam_authentication)
        store.clients()
        store.stop()


@contextmanager
def at_wandb(home: Path) -> Iterator[Spot]:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    from tests.wandb_server import serving
    from tests.wandb_server.serving import end_wandb

    with serving(home) as server:

        @contextmanager
        def stopped() -> Iterator[None]:
            server.stop()
            try:
                yield
            finally:
                server.start()

        @contextmanager
        def reading() -> Iterator[None]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WANDB_API_KEY", server.read_key)
                end_wandb()
                yield
            end_wandb()

        yield Spot("wandb", lambda: f"wandb://team/modules{next(NUMBERS)}", stopped, reading)


@contextmanager
def at_wandb_live(_: Path) -> Iterator[Spot]:
    """W&B itself: registries named after this run, which are deleted again."""
    if not os.environ.get("WANDB_API_KEY"):
        pytest.skip("no WANDB_API_KEY: W&B's own service is not tested")
    import wandb

    team = os.environ.get("MODULELENS_WANDB_TEAM", "")
    made: list[str] = []

    def fresh() -> str:
        made.append(f"modulelens-test-{os.urandom(4).hex()}")
        return f"wandb://{team}/{made[-1]}" if team else f"wandb://{made[-1]}"

    yield Spot("wandb_live", fresh)
    for registry in wandb.Api().registries(filter={"name": {"$in": made}}):
        registry.delete()


SPOTS = {"file": at_file, "memory": at_memory, "s3": at_s3, "wandb": at_wandb}
ALL = SPOTS | {"wandb_live": at_wandb_live}
LIVE = pytest.param("wandb_live", marks=pytest.mark.wandb_live)


@pytest.fixture(scope="module", params=[*SPOTS, LIVE])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    try:
        with ALL[request.param](tmp_path_factory.mktemp(request.param)) as found:
            yield found
    except EnvironmentLacks as error:
        pytest.skip(error.message)


@pytest.fixture
def spot(place: Spot) -> Iterator[Spot]:
    """The place of each kind; what a test opens there is closed with it."""
    yield place
    with ExitStack() as each:
        while place.opened:
            each.callback(place.opened.pop().close)


@pytest.fixture
def remote(spot: Spot) -> Remote:
    """An empty remote of each kind."""
    return spot.open()


# ---- what is put


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repo with two traces of a model of three modules; never changed."""
    repo = ml.Repo(tmp_path_factory.mktemp("captured") / "repo")
    add(repo, 1, aliases=("first",))
    add(repo, 2, aliases=("good", "last"))
    repo.tag("net/first", "fast", "layer1.0")
    repo._store.close()
    return repo.root


@pytest.fixture
def store(captured: Path, tmp_path: Path) -> Iterator[LocalStore]:
    """A copy of that repo, of the test's own."""
    shutil.copytree(captured, tmp_path / "captured")
    store = LocalStore(tmp_path / "captured")
    yield store
    store.close()


def records(store: LocalStore) -> list[Metadata]:
    return [store.metadata(row.id) for row in store.find()]


def push(store: LocalStore, url: str, **how: Any) -> Pushed:
    """Sends all entries of a store."""
    return send(store, url, records(store), **how)


def pulled(remote: Remote, folder: Path) -> LocalStore:
    """A new repo with everything that a remote has."""
    store = LocalStore(folder)
    pull(store, remote, everything(remote, {}))
    return store


def contents(store: LocalStore) -> dict[str, tuple[bytes, bytes, dict[str, bytes]]]:
    """All bytes that make the entries of a store: record, state.pt and blobs, by identity."""
    return {
        digest_of(record_of(record)): (
            record_of(record),
            store.state_path(record).read_bytes(),
            {digest: store.blob_path(digest).read_bytes() for digest in record.blobs},
        )
        for record in records(store)
    }


def draft(
    folder: Path, fqn: str = "first", seed: object = 0, *, model: str = "net", **facts: Any
) -> Draft:
    """An entry about to be put, of no real module: remotes do not look inside."""
    record = f"{model}/{fqn}: {seed}".encode()
    state = folder / f"{digest_of(record)}.state"
    state.write_bytes(b"state of " + record)
    found = row(
        model=model, fqn=fqn, name=f"{model}/{fqn}", id=f"{collection_id(model, fqn)}/0", **facts
    )
    return Draft(identity=digest_of(record), row=found, record=record, state=state)


def there(remote: Remote, filter: Mapping[str, Any] | None = None) -> list[Version]:
    """All versions that a filter selects, in two pages or more."""
    page = remote.search(filter or {}, limit=2)
    found = list(page.versions)
    while page.cursor:
        page = remote.search(filter or {}, limit=50, cursor=page.cursor)
        found += page.versions
    return found


def numbered(versions: list[Version]) -> list[tuple[str, int, str]]:
    return sorted((v.row.name, v.version, v.identity) for v in versions)


class Between:
    """A remote that lets all calls through to another; tests change what comes or goes."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    def __getattr__(self, name: str) -> Any:
        return getattr(self.remote, name)


def objects(folder: Path) -> dict[str, bytes]:
    """All objects of a remote on disk, by name, without drafts."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name[:4] != "tmp/"}


torch.set_num_threads(1)
