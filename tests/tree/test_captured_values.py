"""What a module is given and gives, of any kind: captured, stored and read back as it was.

Through trace, repo and entry: values, dtypes, strides, layouts, aliasing, leaf or not.
"""

from __future__ import annotations

import functools
import itertools
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.capture.loop import add_unverified
from tests.tree.values import bits, equal, equal_tensors, tensors, values
from torch import Tensor, nn

import modulelens as ml
from modulelens.tree import tensors_of

_names = itertools.count()
few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Echo(nn.Module):
    """Gives back all that it is given, the arguments twice."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return [args, kwargs, args]


def through(repo: Path, *args: Any, **kwargs: Any) -> ml.Entry:
    """The entry of a call with these arguments."""
    model = Echo()
    with ml.trace(model, name=f"echo{next(_names)}") as trace:
        model(*args, **kwargs)
    return add_unverified(trace, repo)[0]


@given(st.lists(values, max_size=3), st.dictionaries(st.sampled_from("abc"), values))
@few
def test_arguments_and_outputs_of_any_nesting(
    tmp_path: Path, args: list[Any], kwargs: dict[str, Any]
) -> None:
    entry = through(tmp_path, *args, **kwargs)
    found = entry.inputs()
    assert equal(found[0], tuple(args))
    assert equal(found[1], kwargs)
    output = entry.outputs()
    assert equal(output, [tuple(args), kwargs, tuple(args)])
    mutable = (i for i, value in enumerate(args) if isinstance(value, (list, dict)))
    assert all(output[0][i] is output[2][i] for i in mutable)
    assert entry.check().status is ml.Status.EXACT


@given(tensors(), st.data())
@few
def test_tensors_keep_strides_memory_identity_and_history(
    tmp_path: Path, made: list[Tensor], data: st.DataObject
) -> None:
    grown = [t.clone() if t.requires_grad and data.draw(st.booleans()) else t for t in made]
    entry = through(tmp_path, *grown, last={"again": grown[0]})
    (args, kwargs), output = entry.inputs(), entry.outputs()
    back = [*args, kwargs["last"]["again"]]
    assert all(map(equal_tensors, [*grown, grown[0]], back))
    assert [t.is_leaf for t in args] == [t.is_leaf for t in grown]
    assert kwargs["last"]["again"] is args[0]
    assert output[0][0] is output[2][0] is output[1]["last"]["again"]
    for them in (list(args), list(output[0])):
        assert layout_of(them) == layout_of(grown)
    # What is written to one shows in those that shared its memory, and in no other.
    before = [bits(t) for t in args]
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8).set_(args[0].untyped_storage())
        flat.bitwise_xor_(1)
    apart = [i for i, first in enumerate(layout_of(grown)) if first]
    assert all(bits(args[i]) == before[i] for i in apart)


def layout_of(made: list[Tensor]) -> list[int]:
    """For each tensor, the first one that it shares its storage with."""
    storages = [t.untyped_storage()._cdata for t in made]
    return [storages.index(s) for s in storages]


ALL_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
PLAIN = [d for d in ALL_DTYPES if not str(d).startswith(("torch.q", "torch.quint"))]


def elements(tensor: Tensor) -> list[bytes]:
    """The bytes of each element in order; works for dtypes that no kernel knows."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
    size, start = tensor.element_size(), tensor.storage_offset()
    places = itertools.product(*map(range, tensor.shape))
    offsets = [
        start + sum(i * s for i, s in zip(at, tensor.stride(), strict=True)) for at in places
    ]
    return [raw[n * size : (n + 1) * size] for n in offsets]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_dtype_in_every_stride(dtype: torch.dtype, tmp_path: Path) -> None:
    data = [1] * 384 if dtype is torch.bool else [n % 251 for n in range(384)]
    base = torch.tensor(data, dtype=torch.uint8).view(dtype)[:24]
    shapes = {
        "offset and step": base.as_strided((2, 3), (6, 2), 3),
        "transposed": base.as_strided((3, 4), (1, 3)),
        "channels last": base.as_strided((1, 2, 3, 2), (12, 1, 4, 2)),
        "expanded": base.as_strided((5, 2), (0, 1), 1),
        "overlapping": base.as_strided((4, 3), (1, 1)),
        "empty": base.as_strided((0, 3), (3, 1)),
        "scalar": base.as_strided((), (), 7),
    }
    entry = through(tmp_path, **shapes)
    for back in (entry.inputs()[1], entry.outputs()[1]):
        for name, tensor in shapes.items():
            assert back[name].dtype is dtype
            assert (back[name].shape, back[name].stride()) == (tensor.shape, tensor.stride()), name
            assert elements(back[name]) == elements(tensor), name
    assert entry.check().status is ml.Status.EXACT


def jagged(**options: Any) -> Tensor:
    parts = [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, **options)


pairs = functools.partial(torch.sparse_coo_tensor, check_invariants=True)


def holes() -> Tensor:
    return torch.nested.narrow(
        torch.rand(3, 5), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged
    )


LAYOUTS = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo, twice the same place": lambda: pairs([[0, 0]], [1.0, 2.0], (2,)),
    "coo of rows": lambda: pairs([[2, 0]], torch.rand(2, 3), (4, 3)),
    "coo of integers": lambda: torch.tensor([0, 3, 0]).to_sparse(),
    "coo of nothing": lambda: torch.zeros(3).to_sparse(),
    "coo that learns": lambda: torch.eye(3).to_sparse().requires_grad_(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "csr, a batch": lambda: torch.stack([torch.eye(3)] * 2).to_sparse_csr(),
    "jagged": jagged,
    "jagged that learns": lambda: jagged(requires_grad=True),
    "jagged, the last dimension": lambda: jagged().transpose(1, 2),
    "jagged with holes": holes,
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 2, torch.quint8),
}
quiet = pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecat|experimental).*")


class Holds(nn.Module):
    """Keeps a value as attribute and buffer, and gives it back beside its argument."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", value)
        self.kept = {"value": value}

    def forward(self, value: Tensor, *, same: Any) -> Any:
        return [value, same, self.table, self.kept["value"]]


@quiet
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_as_argument_output_and_state(name: str, tmp_path: Path) -> None:
    value = LAYOUTS[name]()
    model = Holds(LAYOUTS[name]())
    with ml.trace(model, name="holds") as trace:
        model(value, same={"value": value})
    entry = add_unverified(trace, tmp_path)[0]
    args, kwargs = entry.inputs()
    module = entry.rebuild()
    for back in (args[0], kwargs["same"]["value"], module.table, module.kept["value"]):
        assert back.layout is value.layout
        assert type(back) is type(value)
        assert back.requires_grad is value.requires_grad
    assert equal_tensors(args[0], value)
    assert equal_tensors(module.table, model.table)
    if value.layout is torch.sparse_coo:
        assert args[0].is_coalesced() is value.is_coalesced()
    assert entry.check().status is ml.Status.EXACT


class UsesOneRow(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return x + mask[0, :4], mask


def test_an_expanded_tensor_is_never_written_out(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mask = torch.rand(1, 1).expand(100_000, 10_000)  # 4 GB if it were
    model = UsesOneRow()
    with ml.trace(model, name="wide") as trace:
        model(torch.rand(2, 4), mask)
    entry = add_unverified(trace, tmp_path)[0]
    back = entry.inputs()[0][1]
    assert (back.shape, back.stride()) == (mask.shape, (0, 0))
    assert entry.check().status is ml.Status.EXACT
    assert entry.check(lambda x, mask: (x + mask[:1, :4], mask)).status.passed
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 500_000  # kB
    stored = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert stored < 200_000


def test_equal_bytes_of_other_meaning_stay_apart(tmp_path: Path) -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    given = {
        "floats": torch.zeros(6),
        "integers": torch.zeros(6, dtype=torch.int32),
        "rows": torch.zeros(2, 3),
        "columns": torch.zeros(3, 2),
        "doubles": torch.zeros(3, dtype=torch.float64),
        "flags": torch.zeros(24, dtype=torch.bool),
        "negative": torch.full((6,), -0.0),
        "nan": nan,
        "other nan": nan.flip(0),
    }
    entry = through(tmp_path, **given)
    back = entry.inputs()[1]
    assert all(equal_tensors(back[name], tensor) for name, tensor in given.items())
    assert 1 / back["negative"][0] == -torch.inf
    back["floats"].fill_(1.0)
    back["rows"][0] = 2.0
    assert not back["integers"].any()
    assert not back["columns"].any()
    assert not back["doubles"].any()
    # The bytes of all the zeros are stored once.
    blobs = [p for p in (tmp_path / "blobs").rglob("*") if p.is_file()]
    assert [p for p in blobs if set(p.read_bytes()) == {0}].__len__() <= 1


class Attributed(nn.Module):
    """Hangs on its weight what libraries hang there: numbers, a tensor, functions, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        hung: Any = self.weight
        hung.width_mult, hung.axes = 0.5, ("rows", {"tp": 2})
        hung.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        hung.loader, hung.owner = torch.tanh, self.extra_repr
        hung.unnamed, hung.main_grad = iter([1]), torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        hung: Any = self.weight
        hung.calls = getattr(hung, "calls", 0) + 1
        out = hung.loader(x * hung * hung.scale * hung.width_mult) * len(hung.axes) * hung.calls
        hung.scale = hung.scale + 1
        return out


class TwiceAttributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attributed()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


def test_attributes_on_parameters_come_back(tmp_path: Path) -> None:
    model = TwiceAttributed()
    with ml.trace(model, name="attributed", keep=ml.Keep(grads=True)) as trace:
        model(torch.rand(2, 4)).sum().backward()
    entries = {e.fqn: e for e in add_unverified(trace, tmp_path)}
    for call, scale in enumerate(([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0])):
        hung = entries["inner"].rebuild(call=call).weight
        assert (hung.width_mult, hung.axes) == (0.5, ("rows", {"tp": 2}))
        assert hung.scale.tolist() == scale
        assert getattr(hung, "calls", 0) == call
        assert hung.loader is torch.tanh
        assert hung.owner.__func__ is nn.Module.extra_repr
        assert not hasattr(hung, "unnamed")
        assert not hasattr(hung, "main_grad")
    for entry in entries.values():
        assert entry.check(backward=True).status is ml.Status.EXACT, entry
    again = entries["inner"]._replay().ready().run
    with again:
        outs = [(again.fresh(), again.forward())[1] for _ in range(2)]
    assert torch.equal(*outs)


class KeepsActivations(nn.Module):
    """Holds results of its last call, with their history."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.history: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.last is not None:
            y = y + self.last.detach().mean()
        self.last = y
        self.history.append(y[:1])
        return y.relu()


def test_kept_activations_come_back_as_values_without_history(tmp_path: Path) -> None:
    model = KeepsActivations()
    with ml.trace(model, name="keeps", warmup=1, keep=ml.Keep(grads=True)) as trace:
        for _ in range(2):
            model(torch.rand(2, 4)).sum().backward()
    entry = {e.fqn: e for e in add_unverified(trace, tmp_path)}[""]
    module = entry.rebuild()
    held = tensors_of([module.last, module.history])
    assert len(held) == 2
    assert all(t.grad_fn is None and not t.requires_grad for t in held)
    assert entry.check(backward=True).status is ml.Status.EXACT


class ByIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).tanh()


def test_sparse_gradients_are_compared_by_what_they_say(tmp_path: Path) -> None:
    model = ByIndex()
    with ml.trace(model, name="sparse", keep=ml.Keep(grads=True)) as trace:
        model(torch.tensor([5, 1, 5, 0])).square().sum().backward()
    entries = {e.fqn: e for e in add_unverified(trace, tmp_path)}
    for entry in entries.values():
        assert entry.check(backward=True).status is ml.Status.EXACT
        ((_, grad),) = entry.grads()["parameters"].items()
        assert grad.layout is torch.sparse_coo
        assert not grad.is_coalesced()

    def backwards(module: ByIndex, ids: Tensor) -> Tensor:
        return module.table(ids.flip(0)).flip(0).tanh()

    def half(module: ByIndex, ids: Tensor) -> Tensor:
        y = module.table(ids).tanh()
        return y + (y.detach() - y) * torch.tensor([[0.0], [0.0], [1.0], [0.0]])

    found = entries[""].check(backwards, backward=True)
    assert found.status.passed, found.reason
    found = entries[""].check(half, backward=True)
    assert found.status is ml.Status.MISMATCH_VALUE
    assert 'grad["table.weight"]' in found.reason


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dynamic = torch.ao.quantization.quantize_dynamic
        self.layer = dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.layer(x) + table.dequantize().sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_modules_come_back_and_a_scheme_without_a_rule_is_named(tmp_path: Path) -> None:
    model = Quantised().eval()
    plain = torch.quantize_per_tensor(torch.rand(3), 0.1, 2, torch.quint8)
    axes = torch.rand(2), torch.zeros(2)
    odd = torch.quantize_per_channel(torch.rand(2, 4), *axes, 0, torch.quint4x2)
    for table, exact in ((plain, True), (odd, False)):
        with ml.trace(model, name=f"quantised{exact}") as trace:
            model(torch.rand(2, 4), table)
        entries = {e.fqn: e for e in add_unverified(trace, tmp_path)}
        assert entries["layer.0"].check().status is ml.Status.EXACT
        assert type(entries["layer.0"].rebuild()) is type(model.layer[0])
        found = entries[""].check()
        assert (found.status is ml.Status.EXACT) is exact
        assert (
            exact
            or "an argument holds torch:Tensor: a tensor quantised to quint4x2" in found.reason
        )


def _arrays() -> dict[str, Any]:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    fixed = base.copy()
    fixed.flags.writeable = False
    return {
        "columns first": np.asfortranarray(base),
        "turned round": base[::-1, ::2],
        "transposed": base.reshape(2, 3, 4).transpose(2, 0, 1),
        "every third": base.reshape(-1)[1::3],
        "read only": fixed,
        "broadcast": np.broadcast_to(base[:1], (5, 6)),
        "one of many": np.zeros((1000, 1000), np.int16)[:3, 7],
        "none": base[:0],
        "scalar": base[1, 2, ...],
        "other bytes": base.astype(">f4").T,
    }


@pytest.mark.parametrize("kind", _arrays())
def test_numpy_arrays_keep_their_layout(tmp_path: Path, kind: str) -> None:
    array = _arrays()[kind]
    entry = through(tmp_path, array, torch.ones(1))
    found = entry.inputs()[0][0]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)
    assert found.flags.writeable == array.flags.writeable
    if kind not in ("one of many", "none"):  # its memory is far larger; none has no layout
        assert found.strides == array.strides
    assert entry.check().status is ml.Status.EXACT
