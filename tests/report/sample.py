"""Records as a real capture writes them, small enough to read."""

from __future__ import annotations

from typing import Any

from modulelens.records import (
    Ambient,
    Call,
    Context,
    Environment,
    Grade,
    GradeLevel,
    InitCall,
    Metadata,
    SourceRef,
    TensorRef,
    TensorSpec,
    from_json,
    to_json,
)


def tensor(*shape: int, dtype: str = "float32", stride: tuple[int, ...] = (), **more: Any) -> Any:
    """A `$tensor` node."""
    spec = TensorSpec(dtype=dtype, shape=shape, stride=stride, **more)
    return {"$tensor": TensorRef(spec=spec, group=0, blob="ab" * 32)}


def call(index: int = 0, **more: Any) -> Call:
    """One call of `over_arch`."""
    fields: dict[str, Any] = {
        "args": {"$tuple": [tensor(64, 512, stride=(1, 64), requires_grad=True)]},
        "kwargs": {"mask": None},
        "output": {"logits": tensor(64, 1)},
    }
    return Call(index=index, node="n", context=Context(ambient=Ambient()), **(fields | more))


def metadata(**more: Any) -> Metadata:
    """An entry, as it is after a round trip through its file."""
    fields: dict[str, Any] = {
        "schema": 1,
        "model": "dlrm",
        "fqn": "over_arch",
        "cls": "ranking:MLP",
        "version": 1,
        "created": "2026-01-02T03:04:05+00:00",
        "node": "n",
        "params": 263_681,
        "own_bytes": 1_054_724,
        "init": InitCall(cls="ranking:MLP", args={"$tuple": [[512, 256, 1]]}, kwargs={"p": 0.1}),
        "source": SourceRef(
            path="ranking:MLP", file="ranking.py", line=12, text="class MLP: ...\n"
        ),
        "environment": Environment(python="3.11.7", torch="2.13.0", git_commit="c" * 40),
        "calls": (call(),),
        "grade": Grade(level=GradeLevel.EXACT, strategy="init", outputs=GradeLevel.EXACT),
    }
    return from_json(to_json(Metadata(**(fields | more))), Metadata, what="sample")
