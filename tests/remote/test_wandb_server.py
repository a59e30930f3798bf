"""SDK-contract tests of the stand-in W&B server: the unmodified wandb SDK runs its flows on it.

They hold client and server together, and say nothing about W&B itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.wandb_server import Server, drift, serving
from tests.wandb_server.options import FEATURES
from tests.wandb_server.sdk import LOCK, another_run, draft, log, registry

wandb = pytest.importorskip("wandb")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("wandb")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The server without faults and counts; what it doesn't know fails the test that asked."""
    shared.heal()
    shared.forget()
    yield shared
    assert not shared.unknown


@pytest.fixture
def api(server: Server) -> Any:
    return wandb.Api(timeout=5)


@pytest.fixture
def run(server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    with wandb.init(entity=server.entity, project=project_of(request)) as run:
        server.forget()
        yield run


def project_of(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")[:60]


def test_the_whole_flow_takes_the_calls_it_is_known_for(
    server: Server, api: Any, tmp_path: Path
) -> None:
    steps: dict[str, Counter[str]] = {}

    def step(name: str) -> None:
        report = server.report()
        steps[name] = Counter(report["operations"]) + Counter(report["http"])
        server.forget()

    target = registry(api, server, "flow")
    step("registry")
    run = wandb.init(entity=server.entity, project="flow", job_type="module-capture")
    step("init")
    files = {"m.pt": bytes(range(256)) * 80, "module.json": b"{}"}
    logged = log(run, tmp_path / "a", "layer", files, depth=3)
    step("log")
    log(run, tmp_path / "a", "layer", files, depth=4)
    step("log again")
    link = logged.link(f"{target}/layer", aliases=["prod"])
    step("link")
    found = wandb.Api(timeout=5).artifact(f"{server.org_entity}/{target}/layer:prod")
    step("find")
    got = Path(found.download(root=str(tmp_path / "got"), skip_cache=True))
    step("download")
    run.use_artifact(found)
    step("use")
    found.unlink()
    step("unlink")
    run.finish()
    step("finish")

    assert {p.name: p.read_bytes() for p in got.iterdir()} == files
    assert (logged.version, link.version, sorted(link.aliases)) == ("v0", "v0", ["latest", "prod"])
    assert found.metadata == {"depth": 3}
    assert steps["registry"]["UpsertRegistry"] == 1
    assert steps["init"] == {"UpsertBucket": 1}
    assert steps["log"] == {
        "Viewer": 1,
        "ServerFeaturesQuery": 2,
        "ArtifactType": 1,
        "CreateArtifact": 1,
        "CreateArtifactManifest": 2,
        "CreateArtifactFiles": 1,
        "CommitArtifact": 1,
        "ArtifactByID": 1,
        "put blob": 2,
        "put manifest": 1,
    }
    assert steps["log again"] == {"ArtifactType": 1, "CreateArtifact": 1, "ArtifactByID": 1}
    assert steps["link"] == {"FetchOrgInfoFromEntity": 1, "LinkArtifact": 1}
    assert steps["find"]["ArtifactMembershipByName"] == 1
    assert steps["download"] == {
        "FetchArtifactManifest": 1,
        "GetArtifactMembershipFileUrls": 1,
        "get manifest": 1,
        "get blob": 2,
    }
    assert steps["use"]["UseArtifact"] == 1
    assert steps["unlink"]["UnlinkArtifact"] == 1
    assert steps["finish"]["UpsertBucket"] == 1
    assert steps["finish"]["post file_stream"] == 2
    assert steps["finish"]["put run"] == 3


def test_searches_see_metadata_tags_and_aliases_through_pages(
    server: Server, api: Any, run: Any, tmp_path: Path
) -> None:
    target = registry(api, server, "search")
    for i in range(7):
        logged = log(run, tmp_path / str(i), f"m{i % 2}", {"m.pt": b"%d" % i}, i=i, at={"x.y": i})
        logged.tags = [f"t{i % 3}"]
        logged.save()
        logged.link(f"{target}/m{i % 2}", aliases=[f"a{i}"])

    def versions(where: dict[str, Any], **options: Any) -> list[int]:
        inside = api.registries(organization=server.org, filter={"name": "search"})
        found = inside.collections().versions(filter=where, per_page=2, **options)
        return sorted(version.metadata["i"] for version in found)

    assert versions({}) == [0, 1, 2, 3, 4, 5, 6]
    assert server.operations()["RegistryVersions"] == 4
    server.set(search_lag_s=60)
    assert versions({}) == []
    server.set(search_lag_s=0)
    assert versions({"metadata.i": {"$in": [3, 5, "4"]}}) == [3, 5]
    assert versions({"metadata.at.x.y": {"$gte": 5}}) == [5, 6]
    assert versions({"$or": [{"tag": "t0"}, {"alias": "a1"}]}) == [0, 1, 3, 6]
    assert versions({"alias": "latest"}) == [5, 6]
    assert versions({"$and": [{"metadata.i": {"$lt": 4}}, {"metadata.j": {"$exists": False}}]}) == [
        0,
        1,
        2,
        3,
    ]
    names = [c.name for c in api.registry("search", server.org).collections(per_page=1)]
    assert sorted(names) == ["m0", "m1"]
    regex = {"name": {"$regex": "1$"}}
    assert [c.name for c in api.registry("search", server.org).collections(filter=regex)] == ["m1"]


def test_advanced_search_orders_versions(server: Server, run: Any, tmp_path: Path) -> None:
    server.set(advanced_search=True)
    try:
        api = wandb.Api(timeout=5)
        target = registry(api, server, "ordered")
        for i, size in enumerate((300, 100, 200)):
            log(run, tmp_path / str(i), "m", {"m.pt": bytes(size)}, i=i).link(f"{target}/m")
        inside = api.registries(organization=server.org, filter={"name": "ordered"})
        by_size = inside.versions(order="-artifact_size", filter={"artifact_size": {"$gt": 100}})
        assert [version.size for version in by_size] == [300, 200]
    finally:
        server.set(advanced_search=False)


def test_aliases_and_tags_come_and_go_and_an_alias_protects_from_deletion(
    server: Server, api: Any, run: Any, tmp_path: Path
) -> None:
    target = registry(api, server, "aliases")
    first, second = (log(run, tmp_path / x, "m", {"m.pt": x.encode()}) for x in "ab")
    links = [each.link(f"{target}/m") for each in (first, second)]
    assert [link.version for link in links] == ["v0", "v1"]

    def aliases(version: str) -> list[str]:
        return sorted(api.artifact(f"{server.org_entity}/{target}/m:{version}").aliases)

    link = api.artifact(f"{server.org_entity}/{target}/m:v0")
    link.aliases.append("good")
    link.save()
    assert (aliases("v0"), aliases("v1")) == (["good"], ["latest"])
    other = api.artifact(f"{server.org_entity}/{target}/m:v1")
    other.aliases.append("good")
    other.save()
    assert (aliases("v0"), aliases("v1")) == ([], ["good", "latest"])
    other = api.artifact(f"{server.org_entity}/{target}/m:v1")
    other.aliases.remove("good")
    other.tags = ["fast", "checked twice"]
    other.save()
    assert aliases("v1") == ["latest"]
    assert sorted(api.artifact(f"{server.org_entity}/{target}/m:v1").tags) == [
        "checked twice",
        "fast",
    ]

    collection = api.registry("aliases", server.org).collections()[0]
    collection.tags = ["encoder"]
    collection.save()
    tagged = api.registry("aliases", server.org).collections(filter={"tag": "encoder"})
    assert [c.name for c in tagged] == ["m"]

    source = api.artifact(f"{server.entity}/{run.project}/m:v1")
    with pytest.raises(Exception, match="it has aliases"):
        source.delete()
    source.delete(delete_aliases=True)
    assert aliases("latest") == ["latest"]
    assert api.artifact(f"{server.org_entity}/{target}/m:latest").version == "v0"
    later = [log(run, tmp_path / x, "m", {"m.pt": x.encode()}).version for x in "cd"]
    assert later == ["v2", "v3"]


def test_lineage_is_kept(server: Server, api: Any, run: Any, tmp_path: Path) -> None:
    made = log(run, tmp_path, "m", {"m.pt": b"x"})
    with another_run(server.entity, run.project) as reader:
        reader.use_artifact(f"{server.entity}/{run.project}/m:latest")
        assert made.logged_by().id == run.id
        assert [user.id for user in made.used_by()] == [reader.id]
        path = f"{server.entity}/{run.project}"
        assert [a.name for a in api.run(f"{path}/{run.id}").logged_artifacts()] == ["m:v0"]
        assert [a.name for a in api.run(f"{path}/{reader.id}").used_artifacts()] == ["m:v0"]


def test_listings_of_a_project(server: Server, api: Any, run: Any, tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        log(run, tmp_path / name, name, {"m.pt": name.encode() + str(time.time()).encode()})
    path = f"{server.entity}/{run.project}"
    assert [t.name for t in api.artifact_types(path)] == ["module"]
    assert sorted(c.name for c in api.artifact_type("module", path).collections()) == ["a", "b"]
    assert [v.version for v in api.artifacts("module", f"{path}/a")] == ["v1", "v0"]
    assert api.artifact_exists(f"{path}/a:v1")
    assert not api.artifact_exists(f"{path}/a:v2")
    assert [f.name for f in api.artifact(f"{path}/b:v0").files()] == ["m.pt"]
    collection = api.artifact_collection("module", f"{path}/b")
    collection.description = "of the second kind"
    collection.save()
    assert api.artifact_collection("module", f"{path}/b").description == "of the second kind"
    collection.delete()
    assert not api.artifact_collection_exists(f"{path}/b", "module")


def test_sixteen_threads_log_and_link(server: Server, api: Any, run: Any, tmp_path: Path) -> None:
    target = registry(api, server, "many")

    def one(i: int) -> str:
        made = log(run, tmp_path / str(i), f"m{i % 4}", {"m.pt": b"%d" % i}, i=i)
        with LOCK:
            return made.link(f"{target}/m{i % 4}").version

    with ThreadPoolExecutor(16) as pool:
        links = list(pool.map(one, range(32)))
    for name in range(4):
        assert sorted(links[name::4]) == sorted(f"v{n}" for n in range(8))
    inside = api.registries(organization=server.org, filter={"name": "many"})
    found = inside.collections().versions()
    assert sorted(version.metadata["i"] for version in found) == list(range(32))


def test_twenty_versions_of_one_name_at_once_have_no_gaps(
    server: Server, run: Any, tmp_path: Path
) -> None:
    made = [draft(tmp_path / str(i), "m", {"m.pt": b"%d" % i}) for i in range(20)]
    for each in made:
        run.log_artifact(each)
    versions = [each.wait(timeout=30).version for each in made]
    assert sorted(versions, key=lambda v: int(v[1:])) == [f"v{n}" for n in range(20)]


def test_without_any_feature_logging_and_downloading_still_work(
    server: Server, tmp_path: Path
) -> None:
    server.set(features=dict.fromkeys(FEATURES, False))
    wandb.teardown()
    try:
        with wandb.init(entity=server.entity, project="old-server") as run:
            log(run, tmp_path, "m", {"m.pt": b"x"})
        found = wandb.Api(timeout=5).artifact(f"{server.entity}/old-server/m:v0")
        assert Path(found.download(root=str(tmp_path / "got")), "m.pt").read_bytes() == b"x"
        with pytest.raises(RuntimeError, match="not enabled"):
            wandb.Api(timeout=5).registry("any", server.org)
    finally:
        server.set(features={})
        wandb.teardown()


def eventually(true: Callable[[], Any], within_s: float = 20) -> bool:
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def processes_with(setting: str) -> list[str]:
    """The processes, of Linux at least, that have a setting in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if setting.encode() in environ.read_bytes():
                found.append(environ.parent.name)
    return found


def test_a_killed_client_leaves_a_draft_that_nobody_sees(server: Server, tmp_path: Path) -> None:
    script = """
import sys, wandb
run = wandb.init(entity="team", project="killed")
made = wandb.Artifact("m", type="module")
with made.new_file("m.pt", "w") as file:
    file.write("killed")
run.log_artifact(made)
sys.stdin.read()
"""
    server.fail("put", "blob/", delay_s=60)
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**server.env, "KILLED_CLIENT": str(tmp_path)},
        stdin=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert eventually(lambda: server.report()["http"].get("put blob"))
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    # The SDK's core is a process of its own, which would go on uploading.
    assert eventually(lambda: not processes_with(f"KILLED_CLIENT={tmp_path}"))
    assert server.operations()["CreateArtifact"] == 1
    assert not server.operations()["CommitArtifact"]
    assert not wandb.Api(timeout=5).artifact_exists(f"{server.entity}/killed/m:latest")


def test_nothing_goes_elsewhere_or_into_the_users_files(
    server: Server, api: Any, run: Any, tmp_path: Path
) -> None:
    log(run, tmp_path, "m", {"m.pt": b"x"}).link(f"{registry(api, server, 'near')}/m")
    assert not server.unknown
    client = server.folder.parent / "client"
    assert not list((client / "home").iterdir())
    assert not [path for path in (client / "config").rglob("*") if path.is_file()]
    assert os.environ["HOME"] == str(client / "home")
    # What isn't meant for this machine ends at the server, which is the proxy.
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener().open("http://api.example.invalid/x", timeout=5)
    refused.value.close()
    assert server.unknown == ["GET http://api.example.invalid/x"]
    server.forget()


def test_what_the_server_does_not_know_fails_the_test(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r'"colour".*"sizes".*ServerFeature.name.*"drawing"'),
        serving(tmp_path),
    ):
        api = wandb.Api(timeout=5)
        execute = api._service_api.execute_graphql
        for query in (
            "query Paint { viewer { id colour } }",
            'query Look { project(name: "p", sizes: 3) { id } }',
            "query Kind { serverInfo { features { name { x } } } viewer { id } }",
            "mutation Draw { drawing(input: {a: 1}) { id } }",
        ):
            with pytest.raises(Exception, match=r"Cannot query|Unknown argument|fields"):
                execute(query)


def test_latency_is_added_to_every_call(server: Server, api: Any) -> None:
    server.set(latency_s=0.2)
    server.forget()
    started = time.monotonic()
    api.artifact_exists(f"{server.entity}/none/m:v0")
    took = time.monotonic() - started
    server.set(latency_s=0.0)
    assert took >= 0.2 * sum(server.operations().values()) >= 0.2


def test_registries_and_collections_are_listed_renamed_and_deleted(
    server: Server, api: Any, run: Any, tmp_path: Path
) -> None:
    target = registry(api, server, "kept")
    registry(api, server, "gone")
    made = log(run, tmp_path, "m", {"m.pt": b"listed"})
    made.link(f"{target}/m", aliases=["a"])
    made.link(f"{target}/n")
    wanted = {"name": {"$in": ["kept", "gone"]}}
    found = api.registries(organization=server.org, filter=wanted, order="-name")
    assert [r.name for r in found] == ["kept", "gone"]
    found[1].delete()
    assert [r.name for r in api.registries(organization=server.org, filter=wanted)] == ["kept"]
    assert sorted(link.name for link in made.linked_artifacts) == ["m:v0", "n:v0"]

    first, second = api.registry("kept", server.org).collections(order="name")
    assert sorted(first.aliases) == ["a", "latest"]
    second.delete()
    first.tags = ["x", "y"]
    first.save()
    first.tags = ["y"]
    first.save()
    (first,) = api.registry("kept", server.org).collections()
    assert (first.name, first.tags) == ("m", ["y"])

    path = f"{server.entity}/{run.project}"
    sequence = api.artifact_collection("module", f"{path}/m")
    sequence.change_type("renamed-kind")
    sequence.save()
    assert api.artifact(f"{path}/m:v0").type == "renamed-kind"
    assert [c.name for c in api.project(run.project, server.entity).collections()] == ["m"]
    moved = api.registry("kept", server.org)
    moved.name = "moved"
    moved.save()
    assert api.artifact(f"{server.org_entity}/wandb-registry-moved/m:a").version == "v0"


def test_a_run_resumes_and_logs_the_next_version(server: Server, api: Any, tmp_path: Path) -> None:
    for number in range(2):
        options = {"id": "again", "resume": "allow", "config": {"n": number}}
        with wandb.init(entity=server.entity, project="resumed", **options) as run:
            made = log(run, tmp_path / str(number), "m", {"m.pt": b"resumed %d" % number})
            assert made.version == f"v{number}"
    assert [r.id for r in api.runs(f"{server.entity}/resumed")] == ["again"]


def test_core_operations_outside_the_flows_are_answered(server: Server, run: Any) -> None:
    texts = {**drift.of_core(), "GetViewer": drift.of_python()["GetViewer"]}
    where = {"entity": server.entity, "project": run.project, "run": run.id}
    assert server.posted(texts["ClientIDMapping"], {"clientID": "x"}) == {"clientIDMapping": None}
    flags = server.posted(texts["OrgFeatureFlags"], {"org": server.org})
    assert flags == {"organization": {"featureFlags": []}}
    weave = server.posted(texts["OrganizationCoreWeaveOrganizationID"], {"entityName": "team"})
    assert weave == {"entity": {"organization": {"coreWeaveOrganizationId": None}}}
    info = server.posted(texts["QueryRunInfo"], where)
    assert info["project"]["run"]["summaryMetrics"] == "{}"
    assert server.posted(texts["GetViewer"], {})["viewer"]["entity"] == server.entity


def test_the_operations_of_the_sdk_are_those_the_server_was_written_for() -> None:
    recorded = drift.recorded()
    assert drift.changes(recorded, drift.digests()) == []
    other = {side: {**texts} for side, texts in recorded.items()}
    other["core"]["CommitArtifact"] = ""
    other["python"]["LinkArtifact"] = "0"
    assert drift.changes(recorded, other) == [
        "python: LinkArtifact has another text",
        "core: CommitArtifact is gone",
    ]
