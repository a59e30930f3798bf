"""Other values in the same memory. Knows tensors, no module, and not what the values mean."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modulelens.tree import flatten

#: Values of one storage, of 32 bits at least, and as many numbers between 0 and 1 -> other values.
Draw = Callable[[Tensor, Tensor], Tensor]
_MOST_MOVED = 1 << 16


def scaled(values: Tensor, noise: Tensor) -> Tensor:
    """Each value moved by up to a tenth towards zero: zeros, signs, infinities and range stay."""
    return values * (1 - 0.1 * noise)


def shifted(values: Tensor, noise: Tensor) -> Tensor:
    """Each value moved by about a tenth of their RMS; zeros as well."""
    rms = values.abs().nan_to_num(0.0, 0.0).square().mean().sqrt()
    return values + (noise - 0.5) * (0.3 * rms + 0.01)


def vary(named: Mapping[str, Tensor], draw: Draw) -> None:
    """Gives floating-point tensors other values in place, the same for the same names.

    Shared memory is drawn once, by its first name, and of a large one about 65,000 values, all
    over it. Version counters move, as at an optimizer's step. Integers and bools stay: they may be
    indices.
    """
    seen: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():
        for name in sorted(named):
            stream = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            for tensor in flatten(named[name]).tensors:
                storage = tensor.untyped_storage()
                if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
                if storage._cdata in seen:
                    continue
                seen.add(storage._cdata)
                size = storage.nbytes() // tensor.element_size()
                step = size // _MOST_MOVED | 1  # odd: it visits every column
                some = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                some.set_(storage, 0, (-(-size // step),), (step,))
                noise = torch.rand(some.shape, generator=stream).to(some.device)
                wide = some.to(torch.promote_types(some.dtype, torch.float32))
                some.copy_(draw(wide, noise))
