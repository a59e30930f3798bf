"""An entry as one file that plain torch opens, without ModuleLens."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from modulelens.errors import ClassNotFound, NotFound, NotRebuildable
from modulelens.records import to_json
from modulelens.replay import Replay
from modulelens.tree import flatten


def export(replay: Replay, path: Path) -> Path:
    """Writes the flat `{key: tensor}` that `Entry.export` describes; replaces the file whole.

    Raises:
        NotFound: The file's folder does not exist.
    """
    if not path.parent.is_dir():
        raise NotFound(f"no folder {path.parent} to export to", hint=f"mkdir -p {path.parent}")
    tensors: dict[str, Tensor] = {}
    for call in replay.metadata.calls:
        module, values, synthesized = _parts(replay, call.index)
        if call.index == 0:
            named: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
            named += module.named_buffers(remove_duplicate=False)
            state = _marked("state", synthesized, "weights")
            tensors |= {f"{state}/{name}": tensor.detach() for name, tensor in named}
        tensors |= _leaves(_marked(f"inputs/{call.index}", synthesized, "inputs"), values)
        try:
            tensors |= _leaves(f"outputs/{call.index}", replay.value(call.output))
        except NotRebuildable:
            continue  # only shapes were kept: there is no output to write
    record = bytearray(to_json(replay.metadata))
    tensors["metadata.json"] = torch.frombuffer(record, dtype=torch.uint8)
    draft = path.with_name(f".{path.name}.{os.urandom(12).hex()}")
    try:
        torch.save(tensors, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _parts(replay: Replay, call: int) -> tuple[nn.Module, object, str]:
    """The module, its inputs, and what of both was synthesised; works without its class as well."""
    try:
        ready = replay.ready(call)
    except (ClassNotFound, NotRebuildable):
        module, made_up = replay.bare(call)
        return module, replay.inputs(call), made_up
    return ready.module, (ready.run.args, ready.run.kwargs), ready.synthesized


def _marked(prefix: str, synthesized: str, what: str) -> str:
    return f"synthesised/{prefix}" if what in synthesized else prefix


def _leaves(prefix: str, value: object) -> dict[str, Tensor]:
    return {f"{prefix}/{path}": tensor.detach() for path, tensor in flatten(value).named.items()}
