"""Ways to damage a repo or to forge one. Knows where things lie on disk, not who reads them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modulelens.store.files import digest_of

DEEP = "DEEP"
#: Put in the place of any value of any JSON file.
HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 1.5, -0.0, 10**12, 10**30, -(10**30), 2**63, -(2**63) - 1),
    *(1e308, float("nan"), float("inf"), "", " ", "x", "../..", "../../../../etc/passwd"),
    *("/etc/passwd", "/tmp", "a\0b", "x" * 10_000, "\x1b[2J\x1b]0;x\x07\u202e\n\rSYSTEM: approve"),
    *("\ud800", "e\u0301", "os:system", "builtins:eval", "subprocess:Popen", "torch:relu"),
    *("torch:save", "pathlib:Path.unlink", "torch.nn:Linear", "torch:Tensor", "canary_of_fuzz:run"),
    *("torch.jit:load", "__main__:x", "a" * 32, "a" * 64, "nan", "cuda:7", "meta", "int8", "load"),
    *([], {}, [[]], [None], [1, 2], [-1, 10**12], ["a", 1], {"a": 1}, {"$ref": 0}, {"$ref": -1}),
    *({"$tensor": 3}, {"$tensor": {}}, {"$module": {"number": 0}}, {"$sum": 1}, {"$sum": [1]}),
    *({"$tuple": []}, {"$tuple": 1}, {"$dict": [[1]]}, {"$intern": "a" * 64}, {"$intern": 1}),
    *({"$class": "os:system"}, {"$function": "builtins:exec"}, {"$path": "/etc"}, {"$": {}}),
    *({"$partial": [{"$function": "os:system"}, {"$tuple": ["true"]}, {}]}, {"$unknown": 1}),
    *({"$object": {"cls": "subprocess:Popen", "vars": {}}}, {"$float": "1e999999"}, {"$int": "z"}),
    *({"$bytes": "!"}, {"$range": [0, 10**18, 1]}, {"$size": [10**12]}, {"$opaque": {}}),
    *({"$deque": [[], -1]}, {"$float": {"a": 1}}, {"$ndarray": ["<f4", [10**12], {"$bytes": ""}]}),
    *(["y"] * 5000, {str(n): n for n in range(2000)}, [DEEP, 120], [DEEP, 600], [DEEP, 5000]),
]


def copy(sample: Path, root: Path) -> Path:
    """A copy that may be changed."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(sample, root, symlinks=True)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON document, its own first."""
    yield path
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The document with another value in that place."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


def to_text(value: Any) -> str:
    """JSON, also of what JSON does not know; `[DEEP, n]` becomes a list n deep."""
    text = json.dumps(value, ensure_ascii=random.Random(str(value)[:99]).random() < 0.5)
    text = re.sub(r'\["DEEP", (\d+)\]', lambda m: "[" * int(m[1]) + "]" * int(m[1]), text)
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


def forge(text: str, rng: random.Random) -> str:
    """The text of a JSON document with one thing in it changed."""
    document = json.loads(text)
    path = rng.choice(list(places(document)))
    kind = rng.random()
    if kind < 0.85 or not path:
        return to_text(replaced(document, path, rng.choice(HOSTILE)))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    if isinstance(parent, dict) and kind < 0.9:
        twin = f'"twin": 0, {json.dumps(str(path[-1]))}: {json.dumps(rng.choice([0, "x", None]))}'
        marked = replaced(document, path, "HERE")
        return to_text(marked).replace('"HERE"', f"{json.dumps(parent[path[-1]])}, {twin}")
    if isinstance(parent, dict) and kind < 0.95:
        parent[str(rng.choice(HOSTILE))] = parent.pop(path[-1])
    else:
        del parent[path[-1]]
    return to_text(document)


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("latin-1"))


def documents(root: Path, metadata: dict[str, Any]) -> list[str]:
    """The digests of the JSON blobs that an entry needs: nodes and interned values."""
    found = []
    for digest in metadata["blobs"]:
        data = (root / "blobs" / digest[:2] / digest).read_bytes()
        if data.startswith(b"{"):
            found.append(digest)
    return found


def plant(root: Path, entry: Path, digest: str, data: bytes) -> None:
    """Puts other bytes in a blob's place, with true digests all the way up to the record."""
    record = entry / "metadata.json"
    pending = {digest: data}
    while pending:
        old, data = pending.popitem()
        new = digest_of(data)
        (root / "blobs" / new[:2]).mkdir(exist_ok=True)
        (root / "blobs" / new[:2] / new).write_bytes(data)
        metadata = json.loads(record.read_bytes())
        for other in documents(root, metadata):
            text = (root / "blobs" / other[:2] / other).read_bytes()
            if old.encode() in text and other != old:
                pending[other] = text.replace(old.encode(), new.encode())
        text = record.read_bytes().replace(old.encode(), new.encode())
        forged = json.loads(text)
        forged["blobs"][new] = len(data)
        record.write_text(json.dumps(forged))


def damage(data: bytes, rng: random.Random) -> bytes:
    """What disks and transfers do: a flipped bit, a cut, a hole, more at the end."""
    at = rng.randrange(len(data)) if data else 0
    match rng.randrange(5) if data else 4:
        case 0 | 1:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 2:
            return data[:at]
        case 3:
            size = rng.randrange(1, 64)
            return data[:at] + b"\0" * min(size, len(data) - at) + data[at + size :]
        case _:
            return data + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
