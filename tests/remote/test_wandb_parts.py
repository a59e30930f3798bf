"""The stand-in W&B server without the SDK: filters, ranges, uploads in parts; and 2 GiB with it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.wandb_server import Server, drift, serving
from tests.wandb_server.executor import Refused
from tests.wandb_server.filters import in_metadata, matches
from tests.wandb_server.serving import LOCAL

META = {
    "n": 3,
    "flag": True,
    "name": "encoder.layer.0",
    "shape": [2, 3],
    "deep": {"a.b": {"c": 1.5}},
    "parts": [{"k": 1}, {"k": 2}],
    "nothing": None,
}
FITTING = [
    {},
    {"m.n": 3},
    {"m.n": {"$gte": 3, "$lt": 4}},
    {"m.flag": True},
    {"m.name": {"$regex": r"layer\.\d$"}},
    {"m.name": {"$contains": "coder"}},
    {"m.shape": 2},
    {"m.shape": [2, 3]},
    {"m.shape": {"$size": 2}},
    {"m.shape": {"$all": [3, 2]}},
    {"m.deep.a.b.c": {"$gt": 1}},
    {"m.parts.k": 2},
    {"m.nothing": None},
    {"m.gone": None},
    {"m.gone": {"$exists": False}},
    {"m.nothing": {"$exists": True}},
    {"m.n": {"$nin": [1, 2]}},
    {"m.n": {"$not": {"$gt": 5}}},
    {"$or": [{"m.n": 1}, {"m.flag": True}]},
    {"$nor": [{"m.n": 1}, {"m.n": 2}]},
    {"$not": {"m.n": 1}},
    {"m.n": 3, "m.flag": True},
]
OTHERS = [
    {"m.n": "3"},
    {"m.n": True},
    {"m.flag": 1},
    {"m.flag": {"$gte": 0}},
    {"m.n": {"$gt": "2"}},
    {"m.name": {"$gt": 2}},
    {"m.n": {"$ne": 3}},
    {"m.shape": {"$size": 3}},
    {"m.gone": {"$gt": 0}},
    {"m.gone": {"$exists": True}},
    {"m.n": {"$not": {"$gt": 1}}},
    {"$and": [{"m.n": 3}, {"m.flag": False}]},
    {"m.n": {"$gte": 3, "$lt": 3}},
]


def looked_up(name: str) -> list[Any]:
    return in_metadata(json.dumps(META), name.split(".")[1:])


@pytest.mark.parametrize("condition", FITTING, ids=json.dumps)
def test_a_filter_fits(condition: dict[str, Any]) -> None:
    assert matches(condition, looked_up)


@pytest.mark.parametrize("condition", OTHERS, ids=json.dumps)
def test_a_filter_does_not_fit(condition: dict[str, Any]) -> None:
    assert not matches(condition, looked_up)


@pytest.mark.parametrize("condition", [{"$xor": []}, {"m.n": {"$near": 1}}], ids=json.dumps)
def test_an_unknown_operator_is_refused(condition: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="unknown filter operator"):
        matches(condition, looked_up)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("wandb")) as server:
        yield server


def put(url: str, body: bytes, *, md5: bytes | None = None) -> str:
    """Uploads a body; the reply's ETag."""
    digest = base64.b64encode(hashlib.md5(md5 or body, usedforsecurity=False).digest()).decode()
    headers = {"Content-MD5": digest, "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, body, headers, method="PUT")
    with LOCAL.open(request, timeout=5) as reply:
        return str(reply.headers["ETag"])


def test_an_upload_in_parts_is_checked_and_can_be_completed_twice(server: Server) -> None:
    texts = drift.of_core()

    def ask(operation: str, **variables: Any) -> Any:
        return next(iter(server.posted(texts[operation], variables).values()))

    whole = b"part one, part two"
    digest = base64.b64encode(hashlib.md5(whole, usedforsecurity=False).digest()).decode()
    where = {"entityName": server.entity, "projectName": "parts"}
    manifest = json.dumps({"contents": {"m.pt": {"digest": digest, "size": len(whole)}}}).encode()
    lines = b"wandb-artifact-manifest-v1\nm.pt:%s\n" % digest.encode()
    ask("UpsertBucket", entity=server.entity, project="parts", name="r")
    draft = {
        **where,
        "runName": "r",
        "artifactTypeName": "module",
        "artifactCollectionName": "m",
        "digest": hashlib.md5(lines, usedforsecurity=False).hexdigest(),
        "clientID": "c" * 128,
    }
    made = ask("CreateArtifact", input=draft)["artifact"]
    assert ask("CreateArtifact", input=draft)["artifact"] == made
    asked = {
        "artifactID": made["id"],
        "name": "m.pt",
        "md5": digest,
        "uploadPartsInput": [{"partNumber": 1}, {"partNumber": 2}],
    }
    (edge,) = ask("CreateArtifactFiles", input={"artifactFiles": [asked]})["files"]["edges"]
    upload = edge["node"]["uploadMultipartUrls"]
    urls = [part["uploadUrl"] for part in upload["uploadUrlParts"]]
    assert edge["node"]["uploadUrl"], "the SDK takes a file without it for one that is there"

    def complete() -> Any:
        return ask(
            "CompleteMultipartUploadArtifact",
            completeMultipartAction="Complete",
            completedParts=[{"partNumber": n + 1, "hexMD5": tag} for n, tag in enumerate(tags)],
            artifactID=made["id"],
            storagePath=edge["node"]["storagePath"],
            uploadID=upload["uploadID"],
        )

    tags = [put(urls[0], whole[:9]), '"' + 32 * "0" + '"']
    with pytest.raises(ValueError, match="part 2 of 2 was not uploaded"):
        complete()
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        put(urls[1], b"part two", md5=b"other")
    refused.value.close()
    tags[1] = put(urls[1], whole[9:])
    assert complete() == complete() == {"digest": digest}

    with pytest.raises(ValueError, match="manifest was not uploaded"):
        ask("CommitArtifact", artifactID=made["id"])
    for upload_it in (False, True):
        file = ask(
            "CreateArtifactManifest",
            **where,
            artifactID=made["id"],
            runName="r",
            name="wandb_manifest.json",
            manifestType="FULL",
            digest=base64.b64encode(hashlib.md5(manifest, usedforsecurity=False).digest()).decode(),
            includeUpload=upload_it,
        )["artifactManifest"]["file"]
        assert ("uploadUrl" in file) is upload_it
    put(file["uploadUrl"], manifest)
    assert ask("CommitArtifact", artifactID=made["id"]) == ask(
        "CommitArtifact", artifactID=made["id"]
    )


def test_a_range_of_a_blob(server: Server) -> None:
    body = bytes(range(200))
    url = f"{server.url}/storage/blob/{hashlib.md5(body, usedforsecurity=False).hexdigest()}"
    put(url, body)
    for asked, got in (("5-9", body[5:10]), ("190-", body[190:]), ("190-999", body[190:])):
        request = urllib.request.Request(url, headers={"Range": f"bytes={asked}"})
        with LOCAL.open(request, timeout=5) as reply:
            assert reply.status == 206
            assert reply.read() == got
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        put(url, b"other bytes than the name says")
    refused.value.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("MODULELENS_LARGE" not in os.environ, reason="2 GiB: MODULELENS_LARGE=1")
def test_two_gigabytes_go_up_and_down_in_parts(server: Server, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    size = (2 << 30) + 3
    with (tmp_path / "large.pt").open("wb") as file:
        file.truncate(size)
        file.seek(size - 3)
        file.write(b"end")
    with wandb.init(entity=server.entity, project="large") as run:
        made = wandb.Artifact("large", type="module")
        made.add_file(str(tmp_path / "large.pt"), policy="immutable", skip_cache=True)
        run.log_artifact(made)
        made.wait(timeout=400)
    assert server.operations()["CompleteMultipartUploadArtifact"] >= 1
    found = wandb.Api(timeout=20).artifact(f"{server.entity}/large/large:v0")
    found.download(root=str(tmp_path / "got"), skip_cache=True, multipart=True)
    got = tmp_path / "got" / "large.pt"
    assert got.stat().st_size == size
    with got.open("rb") as file:
        file.seek(size - 5)
        assert file.read() == b"\0\0end"
