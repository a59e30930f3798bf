"""state.pt <-> a flat {key: plain tensor}. The only file of the store that imports torch."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from modulelens.errors import Corrupted, NotFound, UsageError

if TYPE_CHECKING:
    import torch


def dump_state(state: Mapping[str, torch.Tensor]) -> bytes:
    """The bytes of state.pt; equal states give equal bytes.

    Written to memory first: the digest is then that of the bytes meant, and a full disk is an
    OSError of the write instead of torch's RuntimeError about a stream.

    Raises:
        UsageError: A value is not a plain tensor.
    """
    import torch

    for key, value in state.items():
        if type(value) is not torch.Tensor:
            raise UsageError(
                f"state[{key!r}] is a {type(value).__name__}, not a plain tensor",
                hint="encode it with modulelens.tree; state.pt holds plain tensors only",
            )
    return _saved(dict(state)) if state else _nothing()


def _saved(state: dict[str, torch.Tensor]) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


#: Most entries own no small tensor; saving takes longer than all else about them.
_nothing = cache(partial(_saved, {}))


def load_state(
    path: Path, entry_id: str, keys: Sequence[str] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of a state.pt, mapped from the file; writing to them does not change the file.

    Raises:
        Corrupted: Not a state.pt, or its sizes do not fit into the file.
        NotFound: One of `keys` is not in it.
    """
    import torch

    try:
        _check_sizes(path)
        state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # boundary: torch.load fails in many ways on foreign bytes
        raise Corrupted(
            f"state.pt of entry {entry_id} cannot be loaded: {path}: {error}",
            hint="it holds something else than plain tensors; nothing of it was run",
        ) from error
    if not isinstance(state, dict) or not all(map(_is_plain, state.values())):
        raise Corrupted(f"state.pt of entry {entry_id} is no {{key: plain tensor}}: {path}")
    if keys is None:
        return state
    missing = [key for key in keys if key not in state]
    if missing:
        raise NotFound(f"state.pt of entry {entry_id} has no {', '.join(missing[:5])}")
    return {key: state[key] for key in keys}


def _is_plain(value: object) -> bool:
    # One that is expanded, or sparse, could be copied to any size.
    import torch

    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor:
        return False
    return value.layout is torch.strided and value.is_cpu and value.is_contiguous()


def _check_sizes(path: Path) -> None:
    # torch writes records uncompressed; a compressed one could unpack to any size.
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("a record is compressed")
    if sum(record.file_size for record in records) > path.stat().st_size:
        raise ValueError("the records are larger than the file")
