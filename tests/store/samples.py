"""Small real records for the store's tests, and code that runs in another process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from modulelens.records import (
    SCHEMA,
    Ambient,
    Call,
    Context,
    Environment,
    Metadata,
    ModuleNode,
    TensorRef,
    TensorSpec,
    to_json,
)
from modulelens.store import LocalStore, Row


def tensor(*shape: int, dtype: str = "float32", device: str = "cpu") -> dict[str, TensorRef]:
    """A structure: one tensor of which only the shape was kept."""
    return {"$tensor": TensorRef(spec=TensorSpec(dtype=dtype, shape=shape, device=device), group=0)}


def metadata(model: str = "dlrm", fqn: str = "over_arch", **changes: object) -> Metadata:
    """An entry with one call, bfloat16 in and float32 out."""
    call = Call(
        index=0,
        node="",
        context=Context(ambient=Ambient()),
        args={"$tuple": [tensor(2, 64, dtype="bfloat16"), 3]},
        output=tensor(2, 8),
    )
    fields: dict[str, object] = {
        "schema": SCHEMA,
        "model": model,
        "fqn": fqn,
        "cls": "shop.ranking:MLP",
        "params": 1000,
        "own_bytes": 4000,
        "calls": (call,),
        "environment": Environment(torch="2.13.0", git_commit="abc"),
    }
    return Metadata(**(fields | changes))


def put_entry(
    store: LocalStore,
    record: Metadata,
    state: Mapping[str, torch.Tensor],
    aliases: Sequence[str] = (),
) -> Metadata:
    """Stores one entry."""
    return store.put_entries([(record, state)], aliases=aliases)[0]


def add(
    store: LocalStore,
    model: str = "dlrm",
    fqn: str = "over_arch",
    *,
    blobs: tuple[bytes, ...] = (b"weights" * 100,),
    aliases: tuple[str, ...] = (),
    **changes: object,
) -> Metadata:
    """Stores an entry with a node, blobs and one state tensor."""
    node = to_json(ModuleNode(cls="shop.ranking:MLP"))
    data = [node, *blobs]
    digests = store.put_blobs(data)
    sizes = {digest: len(part) for digest, part in zip(digests, data, strict=True)}
    record = metadata(model, fqn, node=digests[0], blobs=sizes, **changes)
    return put_entry(store, record, {"scale": torch.arange(4.0)}, aliases=aliases)


def row(**changes: object) -> Row:
    """A searchable row."""
    fields: dict[str, object] = {
        "id": "0" * 32 + "/1",
        "name": "m/f",
        "model": "m",
        "fqn": "f",
        "cls": "shop.ranking:MLP",
        "version": 1,
    }
    return Row(**(fields | changes))


class Child:
    """A forked process that runs `work`; what it returns is sent back, unless it dies."""

    def __init__(self, work: Callable[[Callable[[object], None]], object]) -> None:
        """`work` is given a function that sends one value at once."""
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(read)
                torch.set_num_threads(1)  # torch's other threads are not in the fork
                send = os.fdopen(write, "w", buffering=1)
                work(lambda value: print(value, file=send))
                status = 0
            except BaseException:  # noqa: BLE001, a child must never return into pytest
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)
        self.lines = os.fdopen(read)

    def line(self) -> str:
        """The next value that it sends; empty when it has ended."""
        return self.lines.readline().strip()

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> tuple[int, list[str]]:
        """Its exit code (minus the signal's number) and the values not read yet."""
        with self.lines:
            rest = self.lines.read().splitlines()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


def run(work: Callable[[Callable[[object], None]], object]) -> list[str]:
    """What a forked process sends, which has to end well."""
    status, lines = Child(work).wait()
    assert status == 0, lines
    return lines


def files(root: Path) -> dict[str, bytes]:
    """All files below a folder except the index and locks, by relative path."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "index.sqlite" not in path.name and not path.name.endswith("lock")
    }
