"""Other values in the same memory. Knows tensors, no module, and not what the values mean."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modulelens.tree import flatten

#: The values of one storage, flat, and a stream of the tensor's name -> other values.
Draw = Callable[[Tensor, torch.Generator], Tensor]


def scaled(values: Tensor, stream: torch.Generator) -> Tensor:
    """Each value moved by up to a tenth towards zero: zeros, signs, infinities and range stay."""
    return _wide(values) * (1 - 0.1 * _noise(values, stream))


def shifted(values: Tensor, stream: torch.Generator) -> Tensor:
    """Each value moved by about a tenth of their RMS; zeros as well."""
    wide = _wide(values)
    rms = wide[wide.isfinite()].abs().square().mean().sqrt().nan_to_num(0.0)
    return wide + (_noise(values, stream) - 0.5) * (0.3 * rms + 0.01)


def vary(named: Mapping[str, Tensor], draw: Draw) -> None:
    """Gives floating-point tensors other values in place, the same for the same names.

    Shared memory is drawn once, by its first name. Integers and bools stay: they may be indices.
    """
    seen: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():
        for name in sorted(named):
            stream = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            for tensor in flatten(named[name]).tensors:
                storage = tensor.untyped_storage()
                known = storage._cdata in seen or tensor.is_meta
                if known or not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                seen.add(storage._cdata)
                size = storage.nbytes() // tensor.element_size()
                flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                flat.set_(storage, 0, (size,), (1,)).copy_(draw(flat, stream))


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _noise(values: Tensor, stream: torch.Generator) -> Tensor:
    noise = torch.rand(values.shape, generator=stream, dtype=torch.float64)
    return noise.to(values.device)
