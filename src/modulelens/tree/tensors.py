"""Tensors of every kind <-> plain strided tensors and JSON. Knows layouts, not where bytes live."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal import nested_tensor

from modulelens.errors import NotRebuildable
from modulelens.records import TensorSpec
from modulelens.tree.names import Importer, path_of
from modulelens.tree.shards import BLOCKS, PART, is_part, part_made, table_made, take_part

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_FLOAT_ZEROS = (torch.per_channel_affine_float_qparams,)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)

Code = Callable[[Any], Any]
Apart = Callable[[Tensor], dict[str, Any]]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        NotRebuildable: torch has no such dtype.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise NotRebuildable(f"this torch has no dtype {name!r}", reason="tensor_subclass")
    return dtype


def spec_of(tensor: Tensor) -> TensorSpec:
    """Description of a plain strided tensor."""
    return TensorSpec(
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        device="cpu" if tensor.is_cpu else str(tensor.device),
        requires_grad=tensor.requires_grad,
    )


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is an `nn.Parameter`; `isinstance` runs Python code for that class."""
    kind = type(tensor)
    return kind is torch.nn.Parameter or (
        kind is not Tensor and isinstance(tensor, torch.nn.Parameter)
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a strided, unquantised tensor of no subclass: bytes plus a spec say it all."""
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and not (tensor.is_quantized or tensor.is_nested)


def distinct(tensor: Tensor) -> Tensor:
    """The tensor with every expanded dimension cut to 1: as a mask of gigabytes lies in memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def encode_special(tensor: Tensor, encode: Code) -> Any:
    """A tensor that is not plain, as JSON over plain ones.

    Raises:
        NotRebuildable: There is no rule for this kind of tensor.
    """
    base: dict[str, Any] = {"requires_grad": tensor.requires_grad}
    if is_parameter(tensor):
        base["parameter"] = True
    if type(tensor) not in PLAIN_TYPES:
        kind, names, parts = _take_apart(tensor)
        return {kind: base | names | {name: encode(part) for name, part in parts.items()}}
    plain = tensor.detach()
    for kind, (fits, apart, _) in _LAYOUTS.items():
        if fits(plain):
            return {kind: base | {name: encode(part) for name, part in apart(plain).items()}}
    raise NotRebuildable(f"a tensor of layout {plain.layout} has no rule", reason="tensor_subclass")


def decode_special(kind: str, body: dict[str, Any], decode: Code, importer: Importer) -> Tensor:
    """The inverse of `encode_special`.

    Raises:
        NotRebuildable: Its class is not allowed.
    """
    parts = {n: decode(part) for n, part in body.items() if n not in ("requires_grad", "parameter")}
    if kind in _PARTS:
        tensor = _PARTS[kind](**parts)
    elif kind in _SUBCLASSES:
        tensor = _SUBCLASSES[kind](importer.get_class(parts.pop("cls"), Tensor), **parts)
    else:
        tensor = _LAYOUTS[kind][2](**parts)
    if body.get("parameter"):
        if kind not in _PARTS:
            return torch.nn.Parameter(tensor, requires_grad=bool(body["requires_grad"]))
        # In place: other references to this object stay the same parameter (tied weights).
        tensor.__class__ = torch.nn.Parameter
    return tensor.requires_grad_() if body.get("requires_grad") else tensor


def _coordinates(tensor: Tensor) -> dict[str, Any]:
    parts = {"indices": tensor._indices(), "values": tensor._values(), "size": tensor.shape}
    return parts | {"is_coalesced": tensor.is_coalesced()}


def _compressed(tensor: Tensor) -> dict[str, Any]:
    rows = tensor.layout in _BY_ROW
    return {
        "compressed_indices": tensor.crow_indices() if rows else tensor.ccol_indices(),
        "plain_indices": tensor.col_indices() if rows else tensor.row_indices(),
        "values": tensor.values(),
        "size": tensor.shape,
        "layout": tensor.layout,
    }


def _quantized(tensor: Tensor) -> dict[str, Any]:
    parts: dict[str, Any] = {"integers": tensor.int_repr()}
    if parts["integers"].shape != tensor.shape or tensor.qscheme() in _FLOAT_ZEROS:
        text = f"a tensor quantised to {dtype_name(tensor.dtype)} by {tensor.qscheme()} has no rule"
        raise NotRebuildable(text, reason="tensor_subclass")
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return parts | {"scale": tensor.q_scale(), "zero": tensor.q_zero_point()}
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return parts | {"scale": scales, "zero": zeros, "axis": tensor.q_per_channel_axis()}


def _from_quantized(integers: Tensor, scale: Any, zero: Any, axis: int | None = None) -> Tensor:
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(integers, scale, zero)
    return torch._make_per_channel_quantized_tensor(integers, scale, zero, axis)


#: kind -> (whether a tensor is of it, its parts, made of those again)
_LAYOUTS: dict[str, tuple[Callable[[Tensor], bool], Apart, Callable[..., Tensor]]] = {
    "$nested": (
        lambda t: t.is_nested,
        lambda t: {"parts": t.unbind()},
        lambda parts: torch.nested.as_nested_tensor(list(parts)),
    ),
    "$sparse": (
        lambda t: t.layout is torch.sparse_coo,
        _coordinates,
        functools.partial(torch.sparse_coo_tensor, check_invariants=True),
    ),
    "$compressed": (
        lambda t: t.layout in _BY_ROW + _BY_COLUMN,
        _compressed,
        functools.partial(torch.sparse_compressed_tensor, check_invariants=True),
    ),
    "$quantized": (lambda t: t.is_quantized, _quantized, _from_quantized),
    "$mkldnn": (
        lambda t: t.is_mkldnn,
        lambda t: {"dense": t.to_dense()},
        lambda dense: dense.to_mkldnn(),
    ),
}


def _take_apart(tensor: Tensor) -> tuple[str, dict[str, Any], dict[str, Any]]:
    cls = type(tensor)
    if is_part(tensor):
        return PART, {}, take_part(tensor)
    path = path_of(cls)
    if path is None:
        text = f"tensor class {cls.__qualname__} has no importable name"
        raise NotRebuildable(text, reason="tensor_subclass")
    if cls.__name__ == "FakeTensor":
        raise NotRebuildable("a fake tensor holds no values", reason="tensor_subclass")
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name).detach() for name in names}
        # A jagged size is symbolic: it is implied by the offsets.
        shape, stride = (
            [size if type(size) is int else None for size in sizes]
            for sizes in (tensor.shape, tensor.stride())
        )
        parts = {"inner": inner, "context": context, "shape": shape, "stride": stride}
        return "$subclass", {"cls": path}, parts
    if cls.__torch_function__ is torch._C._disabled_torch_function_impl or not hasattr(
        tensor, "as_subclass"
    ):
        text = f"tensor class {path} has no __tensor_flatten__"
        raise NotRebuildable(text, reason="tensor_subclass")
    data = tensor.detach().as_subclass(torch.Tensor)
    return "$astensor", {"cls": path}, {"data": data, "vars": dict(vars(tensor))}


def _from_inner(
    cls: Any, inner: dict[str, Tensor], context: Any, shape: list[Any], stride: list[Any]
) -> Tensor:
    if cls is nested_tensor.NestedTensor:
        # Its symbolic size belongs to one process: torch makes a new one from the offsets.
        parts = (inner["_values"], inner["_offsets"], inner.get("_lengths"), context["ragged_idx"])
        made: Tensor = nested_tensor.nested_view_from_values_offsets_lengths(*parts)
        return made
    return cls.__tensor_unflatten__(inner, context, tuple(shape), tuple(stride))  # type: ignore[no-any-return]


def _from_data(cls: type[Tensor], data: Tensor, vars: dict[str, Any]) -> Tensor:
    made: Tensor = data.as_subclass(cls)
    made.__dict__.update(vars)
    return made


_SUBCLASSES: dict[str, Callable[..., Tensor]] = {"$subclass": _from_inner, "$astensor": _from_data}
_PARTS: dict[str, Callable[..., Tensor]] = {PART: part_made, BLOCKS: table_made}
SPECIAL_KINDS = frozenset({*_PARTS, *_LAYOUTS, *_SUBCLASSES})


class _NonLeaf(torch.autograd.Function):
    """Gives `data` a history without copying it and without making it a view."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, data: Tensor) -> Tensor:  # noqa: ARG004
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return grads[0], None


def as_non_leaf(leaf: Tensor) -> Tensor:
    """A non-leaf with the leaf's memory, strides and gradient: it may be changed in place.

    A module whose input was the output of another one may write to it; on a leaf that requires
    grad torch would refuse.
    """
    data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    with torch.no_grad():
        data.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())
    with torch.enable_grad():
        return _NonLeaf.apply(leaf, data)  # type: ignore[no-any-return,no-untyped-call]
