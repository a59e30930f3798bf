"""SDK-contract tests of what goes wrong: how the unmodified SDK answers the stand-in's faults.

A client of the SDK is built on these answers; a new SDK that answers otherwise fails here first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.wandb_server import Server, serving
from tests.wandb_server.options import LONER
from tests.wandb_server.sdk import another_run, draft, log, registry, sdk_leaks

wandb = pytest.importorskip("wandb")
WaitTimeoutError = pytest.importorskip("wandb.sdk.artifacts.exceptions").WaitTimeoutError
HandleAbandonedError = pytest.importorskip("wandb.sdk.mailbox").HandleAbandonedError


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("wandb")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    shared.heal()
    shared.forget()
    yield shared
    assert not shared.unknown


@pytest.fixture
def api(server: Server) -> Any:
    return wandb.Api(timeout=3)


@pytest.fixture(scope="module")
def run(shared: Server) -> Iterator[Any]:
    with wandb.init(entity=shared.entity, project="faults") as run:
        yield run


@pytest.fixture(scope="module")
def target(shared: Server) -> str:
    return registry(wandb.Api(timeout=5), shared, "faults")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """An artifact of each test's own, with content of its own."""
    return request.node.name.replace("[", "-").replace("]", "")


def content(name: str, files: int = 1) -> dict[str, bytes]:
    return {f"{i}.pt": f"{name} {i} ".encode() * 50 for i in range(files)}


def test_uploads_survive_what_passes(
    server: Server, api: Any, run: Any, tmp_path: Path, name: str
) -> None:
    faults = {
        "busy": {"status": 503},
        "reset": {"drop": True},
        "stored": {"drop": True, "after": True},
        "created": {"match": "CreateArtifact$", "drop": True, "after": True},
        "later": {"match": "CreateArtifact$", "status": 429, "headers": {"Retry-After": "1"}},
        "uncommitted": {"match": "CommitArtifact", "status": 500},
        "committed": {"match": "CommitArtifact", "drop": True, "after": True},
    }
    drafts = {each: draft(tmp_path / each, f"{name}-{each}", content(each)) for each in faults}
    for each, how in faults.items():
        if "match" not in how:
            md5 = hashlib.md5(content(each)["0.pt"], usedforsecurity=False).hexdigest()
            server.fail("put", md5, **how)
        else:
            named = f"{name}-{each}" if "Create" in how["match"] else ""
            server.fail("gql", where=named, **how)
    for made in drafts.values():
        run.log_artifact(made)
    for made in drafts.values():
        assert made.wait(timeout=20).version == "v0"
    assert server.report()["faults_taken"] == len(faults)
    assert server.operations()["CommitArtifact"] == len(faults) + 2
    for each in faults:
        found = api.artifacts("module", f"{server.entity}/faults/{name}-{each}")
        assert [v.version for v in found] == ["v0"]


REFUSALS = {
    "503 for ever": ({"kind": "put", "match": "blob/", "n": -1, "status": 503}, {"put blob": 3}),
    "403 of the only file": (
        {"kind": "put", "match": "blob/", "status": 403},
        {"put blob": 1, "CommitArtifact": 0},
    ),
    "commit refused": (
        {"kind": "gql", "match": "CommitArtifact", "message": "no room"},
        {"CommitArtifact": 1},
    ),
}


@pytest.mark.parametrize("fault", REFUSALS, ids=lambda name: name.replace(" ", "-"))
def test_an_upload_fails_and_nothing_shows(
    server: Server, api: Any, run: Any, tmp_path: Path, name: str, fault: str
) -> None:
    how, counts = REFUSALS[fault]
    server.fail(**how)
    started = time.monotonic()
    with pytest.raises(ValueError, match="ArtifactSaver"):
        log(run, tmp_path, name, content(name))
    assert time.monotonic() - started < 6
    report = server.report()
    assert report["faults_taken"] >= 1
    for what, count in counts.items():
        assert {**report["operations"], **report["http"]}.get(what, 0) == count
    assert not api.artifact_exists(f"{server.entity}/faults/{name}:v0")
    server.heal()
    assert log(run, tmp_path, name, content(name)).version == "v0"


def test_one_403_of_four_files_is_survived(
    server: Server, run: Any, tmp_path: Path, name: str
) -> None:
    server.fail("put", "blob/", status=403)
    assert log(run, tmp_path, name, content(name, files=4)).version == "v0"
    assert server.report()["http"]["put blob"] == 5


def test_429_for_ever_ends_with_the_wait_and_it_is_the_only_one(
    server: Server, tmp_path: Path, name: str
) -> None:
    server.fail("gql", "CreateArtifact$", n=-1, status=429, headers={"Retry-After": "1"})
    with another_run(server.entity, "faults") as run:
        made = draft(tmp_path, name, content(name))
        run.log_artifact(made)
        with pytest.raises(WaitTimeoutError):
            made.wait(timeout=0.5)
        with pytest.raises(HandleAbandonedError):
            made.wait(timeout=0.5)


def test_a_link_whose_reply_was_lost_is_one_link(
    server: Server, run: Any, target: str, tmp_path: Path, name: str
) -> None:
    made = log(run, tmp_path, name, content(name))
    server.fail("gql", "LinkArtifact", drop=True, after=True)
    assert made.link(f"{target}/{name}", aliases=["good"]).version == "v0"
    assert server.operations()["LinkArtifact"] == 2


def test_links_are_refused_with_the_servers_words(
    server: Server, run: Any, target: str, tmp_path: Path, name: str
) -> None:
    made = log(run, tmp_path, name, content(name))
    server.fail("gql", "LinkArtifact", status=403)
    with pytest.raises(wandb.CommError, match="injected fault"):
        made.link(f"{target}/{name}")
    with pytest.raises(wandb.CommError, match="wandb-registry-none not found"):
        made.link("wandb-registry-none/x")
    server.set(read_only=[f"{server.org_entity}/{target}"])
    with pytest.raises(wandb.CommError, match="permission denied"):
        made.link(f"{target}/{name}")
    server.set(read_only=[])
    with another_run(server.entity, "faults") as other:
        data = wandb.Artifact(f"{name}-data", type="dataset", metadata={})
        other.log_artifact(data).wait(timeout=20)
        with pytest.raises(wandb.CommError, match="type dataset is not allowed"):
            data.link(f"{target}/{name}-data")
    server.fail("gql", "LinkArtifact", n=-1, status=500)
    with pytest.raises(wandb.CommError):
        made.link(f"{target}/{name}")
    server.heal()
    assert made.link(f"{target}/{name}").version == "v0"


def download(api: Any, server: Server, name: str, root: Path) -> bytes:
    found = api.artifact(f"{server.entity}/faults/{name}:v0")
    found.download(root=str(root), skip_cache=True)
    return (root / "0.pt").read_bytes()


@pytest.mark.parametrize("how", ["corrupt", "short"])
def test_a_wrong_download_is_accepted_and_only_verify_notices(
    server: Server, api: Any, run: Any, tmp_path: Path, name: str, how: str
) -> None:
    files = content(name)
    log(run, tmp_path / "source", name, files)
    server.fail("get", "blob/", **{how: True})
    assert download(api, server, name, tmp_path / "wrong") != files["0.pt"]
    with pytest.raises(ValueError, match="Digest mismatch"):
        api.artifact(f"{server.entity}/faults/{name}:v0").verify(root=str(tmp_path / "wrong"))
    assert download(api, server, name, tmp_path / "right") == files["0.pt"]


def test_downloads_cut_forbidden_or_busy(
    server: Server, api: Any, run: Any, tmp_path: Path, name: str
) -> None:
    import requests

    files = content(name)
    log(run, tmp_path / "source", name, files)
    server.fail("get", "blob/", truncate=True)
    with sdk_leaks(), pytest.raises(requests.exceptions.ChunkedEncodingError):
        download(api, server, name, tmp_path / "cut")
    server.fail("get", "blob/", status=403)
    assert download(api, server, name, tmp_path / "forbidden") == files["0.pt"]
    assert server.report()["http"]["get artifactsV2"] == 1
    server.fail("get", "blob/", status=503)
    assert download(api, server, name, tmp_path / "busy") == files["0.pt"]


def test_a_lookup_that_is_put_off_for_ever_says_busy(server: Server, run: Any) -> None:
    server.fail("gql", "ArtifactMembershipByName", n=-1, status=429, headers={"Retry-After": "9"})
    started = time.monotonic()
    with pytest.raises(wandb.CommError, match="busy"):
        wandb.Api(timeout=1).artifact(f"{server.entity}/faults/none:v0")
    assert time.monotonic() - started < 5


def test_a_header_breaks_the_requests_of_one_run_alone(
    server: Server, run: Any, tmp_path: Path, name: str
) -> None:
    fault = '{"kind": "gql", "match": "CreateArtifact$", "n": -1, "message": "not this run"}'
    with (
        another_run(server.entity, "faults", x_extra_http_headers={"X-Fault": fault}) as broken,
        pytest.raises(ValueError, match="not this run"),
    ):
        log(broken, tmp_path / "a", name, content(name))
    assert log(run, tmp_path / "b", name, content(name)).version == "v0"


def test_unknown_entities_and_people_without_organization(
    server: Server, run: Any, tmp_path: Path, name: str, target: str
) -> None:
    with pytest.raises(wandb.CommError, match="entity nobody not found"):
        another_run("nobody", "p")
    with another_run(LONER, "p") as alone:
        made = log(alone, tmp_path, name, content(name))
        with pytest.raises(wandb.CommError, match="Unable to find organization"):
            made.link(f"{target}/{name}")


def test_keys_that_are_wrong_or_may_only_read(
    server: Server, api: Any, run: Any, tmp_path: Path, name: str
) -> None:
    log(run, tmp_path, name, content(name))
    path = f"{server.entity}/faults/{name}:v0"
    reader = wandb.Api(timeout=3, api_key=server.read_key).artifact(path)
    assert reader.version == "v0"
    reader.description = "mine"
    with pytest.raises(Exception, match="permission denied"):
        reader.save()
    with pytest.raises(wandb.errors.AuthenticationError):
        wandb.Api(timeout=3, api_key="x" * 40).artifact(path)


def test_a_server_that_is_away_and_comes_back_has_its_state(
    server: Server, run: Any, tmp_path: Path, name: str, target: str
) -> None:
    made = log(run, tmp_path / "a", name, content(name))
    made.link(f"{target}/{name}", aliases=["kept"])
    server.kill()
    with pytest.raises(wandb.CommError):
        wandb.Api(timeout=1).artifact(f"{server.org_entity}/{target}/{name}:kept")
    server.start()
    found = wandb.Api(timeout=3).artifact(f"{server.org_entity}/{target}/{name}:kept")
    assert (found.version, found.id) == ("v0", made.id)
    assert log(run, tmp_path / "b", name, {"0.pt": b"other"}).version == "v1"
