"""Tensors of every kind <-> plain strided tensors and JSON. Knows layouts, not where bytes live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulelens.errors import NotRebuildable
from modulelens.records import TensorSpec
from modulelens.tree.names import Importer, path_of

_COMPRESSED = {
    torch.sparse_csr: ("csr", "crow_indices", "col_indices"),
    torch.sparse_bsr: ("bsr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("csc", "ccol_indices", "row_indices"),
    torch.sparse_bsc: ("bsc", "ccol_indices", "row_indices"),
}
_DTYPE_NAMES: dict[torch.dtype, str] = {}
_LAYOUTS = {name: layout for layout, (name, _, _) in _COMPRESSED.items()}
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

EncodeTensor = Callable[[Tensor], Any]
Encode = Callable[[Any], Any]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        NotRebuildable: torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
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
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def encode_special(tensor: Tensor, tensor_json: EncodeTensor, encode: Encode) -> Any:
    """A tensor that is not plain, as JSON over plain ones.

    Raises:
        NotRebuildable: There is no rule for this kind of tensor.
    """
    base: dict[str, Any] = {"requires_grad": tensor.requires_grad}
    if is_parameter(tensor):
        base["parameter"] = True
    if type(tensor) not in PLAIN_TYPES:
        return _encode_subclass(tensor, base, encode)
    plain = tensor.detach()
    if plain.is_nested:
        return {"$nested": base | {"parts": [tensor_json(t) for t in plain.unbind()]}}
    if plain.layout is torch.sparse_coo:
        parts = {"indices": tensor_json(plain._indices()), "values": tensor_json(plain._values())}
        shape = {"shape": list(plain.shape), "coalesced": plain.is_coalesced()}
        return {"$sparse": base | {"layout": "coo"} | shape | parts}
    if plain.layout in _COMPRESSED:
        name, outer, inner = _COMPRESSED[plain.layout]
        parts = {
            "outer": tensor_json(getattr(plain, outer)()),
            "inner": tensor_json(getattr(plain, inner)()),
            "values": tensor_json(plain.values()),
        }
        return {"$sparse": base | {"layout": name, "shape": list(plain.shape)} | parts}
    if plain.is_quantized:
        return {"$quantized": base | _quantized(plain, tensor_json)}
    if plain.is_mkldnn:
        return {"$mkldnn": base | {"dense": tensor_json(plain.to_dense())}}
    raise NotRebuildable(f"a tensor of layout {plain.layout} has no rule", reason="tensor_subclass")


def _quantized(tensor: Tensor, tensor_json: EncodeTensor) -> dict[str, Any]:
    dtype = dtype_name(tensor.dtype)
    integers = tensor_json(tensor.int_repr())
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {
            "dtype": dtype,
            "integers": integers,
            "scale": tensor.q_scale(),
            "zero": tensor.q_zero_point(),
        }
    return {
        "dtype": dtype,
        "integers": integers,
        "scales": tensor_json(tensor.q_per_channel_scales()),
        "zeros": tensor_json(tensor.q_per_channel_zero_points()),
        "axis": tensor.q_per_channel_axis(),
    }


def _encode_subclass(tensor: Tensor, base: dict[str, Any], encode: Encode) -> Any:
    cls = type(tensor)
    path = path_of(cls)
    if path is None:
        raise NotRebuildable(
            f"tensor class {cls.__qualname__} has no importable name", reason="tensor_subclass"
        )
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        shape, stride = _ints(tensor.shape), _ints(tensor.stride())
        inner = {name: encode(getattr(tensor, name).detach()) for name in names}
        extra = {"inner": inner, "context": encode(context), "shape": shape, "stride": stride}
        return {"$subclass": base | {"cls": path} | extra}
    if cls.__torch_function__ is torch._C._disabled_torch_function_impl or not hasattr(
        tensor, "as_subclass"
    ):
        raise NotRebuildable(
            f"tensor class {path} has no __tensor_flatten__", reason="tensor_subclass"
        )
    plain = tensor.detach().as_subclass(torch.Tensor)
    return {
        "$astensor": base | {"cls": path, "data": encode(plain), "vars": encode(dict(vars(tensor)))}
    }


def _ints(sizes: Any) -> list[int | None]:
    # A jagged size is symbolic: it is implied by the offsets.
    return [size if type(size) is int else None for size in sizes]


def decode_special(kind: str, body: dict[str, Any], decode: Encode, importer: Importer) -> Tensor:
    """The inverse of `encode_special`.

    Raises:
        NotRebuildable: The kind is unknown or its class is not allowed.
    """
    tensor = _DECODERS[kind](body, decode, importer)
    if body.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=bool(body["requires_grad"]))
    return tensor.requires_grad_() if body.get("requires_grad") else tensor


def _nested(body: dict[str, Any], decode: Encode, _: Importer) -> Tensor:
    return torch.nested.as_nested_tensor([decode(part) for part in body["parts"]])


def _sparse(body: dict[str, Any], decode: Encode, _: Importer) -> Tensor:
    shape, values = tuple(body["shape"]), decode(body["values"])
    if body["layout"] == "coo":
        made = torch.sparse_coo_tensor(
            decode(body["indices"]), values, shape, check_invariants=True
        )
        return made._coalesced_(bool(body["coalesced"]))
    layout = _LAYOUTS[body["layout"]]
    outer, inner = decode(body["outer"]), decode(body["inner"])
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=layout, check_invariants=True
    )


def _requantized(body: dict[str, Any], decode: Encode, _: Importer) -> Tensor:
    integers = decode(body["integers"])
    if "scale" in body:
        return torch._make_per_tensor_quantized_tensor(integers, body["scale"], body["zero"])
    scales, zeros = decode(body["scales"]), decode(body["zeros"])
    return torch._make_per_channel_quantized_tensor(integers, scales, zeros, body["axis"])


def _mkldnn(body: dict[str, Any], decode: Encode, _: Importer) -> Tensor:
    return decode(body["dense"]).to_mkldnn()  # type: ignore[no-any-return]


def _subclass(body: dict[str, Any], decode: Encode, importer: Importer) -> Tensor:
    cls = _tensor_class(importer, body["cls"])
    inner = {name: decode(value) for name, value in body["inner"].items()}
    context = decode(body["context"])
    if body["cls"] == "torch.nested._internal.nested_tensor:NestedTensor":
        # Its symbolic size belongs to one process: torch makes a new one from the offsets.
        from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

        made: Tensor = nested_view_from_values_offsets_lengths(
            inner["_values"],
            inner["_offsets"],
            inner.get("_lengths"),
            ragged_idx=context["ragged_idx"],
        )
        return made
    return cls.__tensor_unflatten__(inner, context, tuple(body["shape"]), tuple(body["stride"]))  # type: ignore[no-any-return,attr-defined]


def _astensor(body: dict[str, Any], decode: Encode, importer: Importer) -> Tensor:
    cls = _tensor_class(importer, body["cls"])
    made: Tensor = decode(body["data"]).as_subclass(cls)
    vars(made).update(decode(body["vars"]))
    return made


def _tensor_class(importer: Importer, path: str) -> type[Tensor]:
    cls = importer.get(path)
    if not (isinstance(cls, type) and issubclass(cls, Tensor)):
        raise NotRebuildable(f"{path} is no tensor class", reason="tensor_subclass")
    return cls


_DECODERS: dict[str, Callable[[dict[str, Any], Encode, Importer], Tensor]] = {
    "$nested": _nested,
    "$sparse": _sparse,
    "$quantized": _requantized,
    "$mkldnn": _mkldnn,
    "$subclass": _subclass,
    "$astensor": _astensor,
}
SPECIAL_KINDS = frozenset(_DECODERS)


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
