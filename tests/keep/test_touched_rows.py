"""Of large embedding tables the rows that a step looked up are kept and rebuilt in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loop import add_unverified
from torch import Tensor, nn

import modulelens as ml
from modulelens.capture.snapshot import Snapshots
from modulelens.errors import Corrupted
from modulelens.rebuild.table import table_of, zeros
from modulelens.records import Reason, TensorRef, TensorSpec
from modulelens.report.coverage import coverage_report
from modulelens.report.entry import entry_page
from modulelens.report.entry_view import entry_view
from modulelens.report.rows import rows_table
from modulelens.verify import grade

ROWS, WIDTH = 40_000, 16
TABLE = ROWS * WIDTH * 4
LOOKUPS = {torch.embedding, torch.embedding_bag}


class Ranks(nn.Module):
    """A table below a module that a filter may leave out, and a head of its own."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.lookup = nn.Sequential(table)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found = self.lookup[0](*args, **kwargs)
        return self.head(found.float()).tanh()


def ids(*shape: int, seed: int = 0, dtype: torch.dtype = torch.long) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, ROWS, shape, generator=generator).to(dtype)


def table(**kwargs: Any) -> nn.Embedding:
    return nn.Embedding(ROWS, WIDTH, **kwargs)


def bag(**kwargs: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(ROWS, WIDTH, **kwargs)


def step(model: nn.Module, forward: Callable[[nn.Module], Tensor], lr: float = 1.0) -> None:
    forward(model).square().sum().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    if parameters:
        torch.optim.SGD(parameters, lr=lr).step()


def traced(
    model: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    repo: Path,
    *,
    steps: int = 1,
    modules: str = "*",
    learn: bool = True,
    **keep: Any,
) -> tuple[ml.Trace, dict[str, ml.Entry]]:
    """As many steps as asked for, with an optimizer that moves what was looked up."""
    kept = ml.Keep(**{"grads": True} | keep)
    with ml.trace(model, name="m", keep=kept, steps=steps, modules=modules) as trace:
        for _ in range(steps):
            model.zero_grad()
            step(model, forward) if learn else forward(model)
    return trace, {entry.fqn: entry for entry in add_unverified(trace, repo)}


def stored(repo: Path) -> int:
    return sum(f.stat().st_size for f in repo.rglob("*") if f.is_file())


def rows_in(*numbers: Tensor) -> int:
    return torch.cat([n.reshape(-1).long() for n in numbers]).unique().numel()


X, OFFSETS = ids(60), torch.tensor([0, 7, 7, 40])
LOOKED_UP: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], int]] = {
    "embedding": (table, lambda m: m(X), rows_in(X)),
    "two dimensions": (table, lambda m: m(ids(5, 6)), rows_in(ids(5, 6))),
    "int32": (table, lambda m: m(ids(9, dtype=torch.int32)), rows_in(ids(9))),
    "padding": (
        lambda: table(padding_idx=0),
        lambda m: m(torch.cat([X, X.new_zeros(9)])),
        rows_in(X) + 1,
    ),
    "padding from the end": (lambda: table(padding_idx=-1), lambda m: m(X), rows_in(X)),
    "sparse gradient": (lambda: table(sparse=True), lambda m: m(X), rows_in(X)),
    "scaled by frequency": (
        lambda: table(scale_grad_by_freq=True),
        lambda m: m(X % 7 + 1),
        7,
    ),
    "bfloat16": (lambda: table(dtype=torch.bfloat16), lambda m: m(X), rows_in(X)),
    "frozen": (
        lambda: nn.Embedding.from_pretrained(torch.randn(ROWS, WIDTH)),
        lambda m: m(X),
        rows_in(X),
    ),
    "nothing looked up": (table, lambda m: m(X[:0]), 0),
    "one row": (table, lambda m: m(X[:1]), 1),
    "mean of bags": (bag, lambda m: m(X, OFFSETS), rows_in(X)),
    "largest of bags": (lambda: bag(mode="max"), lambda m: m(X, OFFSETS), rows_in(X)),
    "bags of equal length": (bag, lambda m: m(ids(5, 6)), rows_in(ids(5, 6))),
    "bags with int32": (
        bag,
        lambda m: m(X.int(), OFFSETS.int()),
        rows_in(X),
    ),
    "bags with a last offset": (
        lambda: bag(mode="sum", include_last_offset=True, sparse=True),
        lambda m: m(X, torch.tensor([0, 20, 60])),
        rows_in(X),
    ),
    "weighted bags": (
        lambda: bag(mode="sum"),
        lambda m: m(X, OFFSETS, per_sample_weights=torch.arange(60.0)),
        rows_in(X),
    ),
}


@pytest.mark.parametrize("name", LOOKED_UP)
@pytest.mark.parametrize("modules", ["*", ""])
def test_rows_that_were_looked_up_are_kept_and_give_the_same(
    name: str, modules: str, tmp_path: Path
) -> None:
    build, forward, count = LOOKED_UP[name]
    torch.manual_seed(0)
    model = Ranks(build())
    plain = copy.deepcopy(model)
    before = model.lookup[0].weight.detach().clone()
    _, entries = traced(model, forward, tmp_path, modules=modules)
    step(plain, forward)
    for traced_p, plain_p in zip(model.parameters(), plain.parameters(), strict=True):
        assert traced_p.equal(plain_p)
    assert {torch.embedding, torch.embedding_bag} == LOOKUPS

    assert entries[""].metadata.table_rows == {"lookup.0.weight": (count, ROWS)}
    rebuilt = entries[""].rebuild().lookup[0].weight
    touched = rebuilt.any(-1)
    assert int(touched.sum()) in (count, count - 1)  # a padding row is zeros
    assert rebuilt[touched].equal(before[touched])
    for entry in entries.values():
        found = grade(entry._replay())
        assert found.level == "exact", found.reasons
        assert found.param_grads in (None, "exact")
        assert "param_grads" not in found.reasons or not model.lookup[0].weight.requires_grad
        assert entry.check(backward=True).status is ml.Status.EXACT
    row = WIDTH * before.element_size() + 8
    assert stored(tmp_path) < 2 * count * row + 300_000 < TABLE / 4


class Reads(nn.Module):
    """Uses its table in more ways than by calling it."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = table()
        self.scale = nn.Linear(WIDTH, WIDTH, bias=False)
        self.how = how

    def forward(self, numbers: Tensor) -> Tensor:
        return self.scale(self.how(self, numbers))


def by_function(model: Any, numbers: Tensor) -> Tensor:
    return F.embedding(numbers, model.table.weight) + model.table(numbers + 1 - 1)


def by_other_rows(model: Any, numbers: Tensor) -> Tensor:
    return F.embedding(numbers // 2, model.table.weight) + model.table(numbers)


def by_slice(model: Any, numbers: Tensor) -> Tensor:
    return model.table(numbers) + model.table.weight[7]


def by_product(model: Any, numbers: Tensor) -> Tensor:
    scores = F.linear(model.table(numbers), model.table.weight)
    return model.table(numbers) * scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("how", [by_function, by_other_rows])
def test_a_lookup_by_function_is_seen(how: Any, tmp_path: Path) -> None:
    _, entries = traced(Reads(how), lambda m: m(X), tmp_path)
    kept, _ = entries[""].metadata.table_rows["table.weight"]
    assert kept == rows_in(X, X // 2 if how is by_other_rows else X)
    assert all(grade(entry._replay()).level == "exact" for entry in entries.values())


def test_a_head_that_multiplies_with_the_table_is_noticed_in_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reads(by_product)
    _, entries = traced(model, lambda m: m(X), tmp_path)
    assert not entries[""].metadata.table_rows
    assert all(grade(entry._replay()).level == "exact" for entry in entries.values())
    assert grade(entries[""]._replay()).param_grads == "exact"
    assert not model.table.weight._backward_hooks


@pytest.mark.parametrize("how", [by_slice, by_product])
def test_a_use_that_is_no_lookup_is_found_and_named(how: Any, tmp_path: Path) -> None:
    _, entries = traced(Reads(how).eval(), lambda m: m(X), tmp_path / "touched", learn=False)
    found = grade(entries[""]._replay())
    reason, text = found.reasons["outputs"]
    assert (found.level.value, reason) == ("no", Reason.NOT_KEPT.value)
    assert "looked up were kept of table.weight" in text
    assert "embedding_rows='all'" in text
    check = entries[""].check()
    assert check.status is ml.Status.MISMATCH_VALUE
    assert any("embedding_rows='all'" in warning for warning in check.warnings)
    assert grade(entries["table"]._replay()).level == "exact"
    _, entries = traced(Reads(how), lambda m: m(X), tmp_path / "all", embedding_rows="all")
    assert grade(entries[""]._replay()).level == "exact"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.table(numbers))


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = table(), bag(mode="sum")
        self.second.weight = self.first.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.first(numbers) + self.second(numbers[:, None] // 3)


class HandsOver(nn.Module):
    """Gives a view of its table to a module that is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.flat = nn.Flatten()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table(numbers) + self.flat(self.table.weight[5:6])


WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "tied to a head": (Tied, lambda m: m(X[:5])),
    "more than half": (table, lambda m: m(torch.arange(ROWS // 2 + 1))),
    "small": (lambda: nn.Embedding(1000, WIDTH), lambda m: m(X % 1000)),
    "written by its lookups": (lambda: table(max_norm=1.0), lambda m: m(X)),
    "a view is handed over": (HandsOver, lambda m: m(X)),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(table()),
        lambda m: m(X),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_tables_of_which_rows_would_not_do_are_kept_whole(name: str, tmp_path: Path) -> None:
    build, forward = WHOLE[name]
    torch.manual_seed(0)
    _, entries = traced(build(), forward, tmp_path)
    for entry in entries.values():
        assert not entry.metadata.table_rows
        assert grade(entry._replay()).level == "exact"


def test_a_table_of_two_names_is_one(tmp_path: Path) -> None:
    _, entries = traced(TwoNames(), lambda m: m(X), tmp_path)
    count = rows_in(X, X // 3)
    assert entries[""].metadata.table_rows == {
        "first.weight": (count, ROWS),
        "second.weight": (count, ROWS),
    }
    made = entries[""].rebuild()
    assert made.first.weight is made.second.weight
    assert all(grade(entry._replay()).level == "exact" for entry in entries.values())


def test_calls_add_up_and_steps_have_rows_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = table()
    wanted = iter((ids(30, seed=1), ids(30, seed=2)))
    _, entries = traced(model, lambda m: m(next(wanted)), tmp_path, steps=2)
    entry = entries[""]
    first, second = (entry.rebuild(call=call).weight for call in (0, 1))
    assert int(first.any(-1).sum()) == rows_in(ids(30, seed=1))
    assert int(second.any(-1).sum()) == rows_in(ids(30, seed=2))
    assert grade(entry._replay()).level == "exact"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = table()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table(numbers) + self.table(numbers // 2)


def test_calls_of_one_step_share_their_rows(tmp_path: Path) -> None:
    _, entries = traced(Twice(), lambda m: m(X), tmp_path)
    assert entries["table"].metadata.table_rows == {"weight": (rows_in(X, X // 2), ROWS)}
    assert all(grade(entry._replay()).level == "exact" for entry in entries.values())


class MovesItsTable(nn.Module):
    """Changes the table between two lookups, as a fused optimizer or a momentum copy does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table().requires_grad_(False)

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.table(numbers)
        self.table.weight.mul_(0.5)
        return found + self.table(numbers)


def test_a_table_that_moves_within_the_step_has_versions(tmp_path: Path) -> None:
    _, entries = traced(MovesItsTable(), lambda m: m(X).requires_grad_(), tmp_path)
    entry = entries["table"]
    first, second = (entry.rebuild(call=call).weight for call in (0, 1))
    assert first[X].mul(0.5).equal(second[X])
    assert first[X].any()
    assert all(grade(e._replay()).level == "exact" for e in entries.values())


def halve_data(weight: Tensor) -> None:
    weight.data.mul_(0.5)


def set_data(weight: Tensor) -> None:
    weight.data = weight.data * 0.5


def shift_part(weight: Tensor) -> None:
    weight.detach().data[10_000:].sub_(1.0)


def copy_over(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(0))


class WritesBefore(nn.Module):
    """Writes to its table past torch's write counter, before or between its lookups."""

    def __init__(self, write: Callable[[Tensor], None], order: str) -> None:
        super().__init__()
        self.table, self.write, self.order = table(), write, order

    def forward(self, numbers: Tensor) -> Tensor:
        found = []
        for verb in self.order:
            if verb == "w":
                self.write(self.table.weight)
            else:
                look = F.embedding(numbers + len(found), self.table.weight)
                found.append(look if verb == "f" else self.table(numbers + len(found)))
        return torch.stack(found).sum(0)


WRITES = [halve_data, set_data, shift_part, copy_over]


@pytest.mark.parametrize("order", ["wl", "lwl", "lwlwl", "wf", "fwf", "lw"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_past_the_counter_is_seen(write: Any, order: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WritesBefore(write, order)
    before = copy.deepcopy(model.table.weight)
    wanted = copy.deepcopy(model)(X)
    _, entries = traced(model, lambda m: m(X), tmp_path)
    entry = entries[""]
    assert entry.outputs().equal(wanted)
    assert entry.rebuild().table.weight[X].equal(before[X])
    if order != "lw":  # the other way round nothing shows it but what the call left
        assert entry.run().equal(wanted)
    assert entry.check().status is ml.Status.EXACT
    assert all(grade(e._replay()).outputs == "exact" for e in entries.values())


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_calls_of_a_part_is_seen(write: Any, tmp_path: Path) -> None:
    """The part is called by the loop, after the model's own forward."""
    torch.manual_seed(0)
    model = Ranks(table())
    with ml.trace(model) as trace:
        first = model(X)
        write(model.lookup[0].weight)
        second = model.lookup[0](X)
    assert first.shape != second.shape
    entries = {e.fqn: e for e in ml.Repo(tmp_path).add(trace, verify=False)}
    for call in (0, 1):
        assert entries["lookup.0"].check(call=call).status is ml.Status.EXACT
    assert entries["lookup.0"].outputs(call=1).equal(second)
    assert entries[""].check().status is ml.Status.EXACT


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_same(mode: Any, tmp_path: Path) -> None:
    model = Ranks(table())
    with ml.trace(model, name="m") as trace, mode():
        model(X)
    for entry in add_unverified(trace, tmp_path):
        assert grade(entry._replay()).level == "exact"
    assert entry.metadata.fqn == "head"


def test_a_row_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    model = Ranks(table())
    with ml.trace(model, name="m") as trace:
        with pytest.raises(IndexError):
            model(torch.tensor([ROWS]))
        step(model, lambda m: m(X))
    assert {torch.embedding, torch.embedding_bag} == LOOKUPS
    entry = add_unverified(trace, tmp_path)[0]
    assert entry.metadata.table_rows == {"lookup.0.weight": (rows_in(X), ROWS)}
    assert grade(entry._replay()).level == "exact"


def test_pages_and_coverage_say_how_many_rows(tmp_path: Path) -> None:
    trace, entries = traced(Ranks(bag()), lambda m: m(X, OFFSETS), tmp_path)
    said = f"lookup.0.weight rows {rows_in(X)} of 40,000"
    assert said in coverage_report(trace.coverage)
    assert trace.coverage["lookup.0"].table_rows == {"weight": (rows_in(X), ROWS)}
    assert said in entry_page(entry_view(entries[""].metadata))
    repo = ml.Repo(tmp_path)
    assert f"lookup.0.weight {rows_in(X)}/40000" in rows_table(repo.rows({}), total=4)
    assert len(repo.find({"tables": {"$exists": True}})) == 2
    assert "ROWS KEPT" not in rows_table(repo.rows({"fqn": "head"}), total=1)


def test_where_weights_keep_shapes_only_all_of_the_table_is_made_up(tmp_path: Path) -> None:
    _, entries = traced(Ranks(table()), lambda m: m(X), tmp_path, weights="shape", tensors="shape")
    weight = entries[""].rebuild().lookup[0].weight.detach()
    assert weight.shape == (ROWS, WIDTH)
    assert not entries[""].metadata.table_rows
    assert float(weight.std()) == pytest.approx(1.0, rel=0.2)
    assert entries[""].check(backward=True).status is ml.Status.NOT_COMPARABLE
    assert grade(entries["lookup.0"]._replay()).level == "shape"


def test_rows_that_do_not_fit_a_limit_are_not_said_to_be_kept(tmp_path: Path) -> None:
    model = Ranks(table())
    trace, entries = traced(model, lambda m: m(X), tmp_path, max_bytes=1000)
    assert not entries[""].metadata.table_rows
    assert not any(item.table_rows for item in trace.coverage)
    assert trace.coverage["lookup.0"].dropped_bytes > rows_in(X) * WIDTH * 4
    assert entries[""].run().isfinite().all()


def test_a_table_takes_no_memory_but_that_of_its_rows() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return pages * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    rows, width = 1 << 20, 64
    numbers = torch.arange(3, rows, rows // 50)
    kept = torch.randn(len(numbers), width)
    data = torch.cat([kept.view(torch.uint8).reshape(-1), numbers.view(torch.uint8)])
    spec = TensorSpec(dtype="float32", shape=(rows, width), stride=(width, 1))
    ref = TensorRef(spec=spec, group=0, blob="x", rows=len(numbers))
    before = resident()
    made = table_of(ref, data.untyped_storage())
    assert made.nbytes() == rows * width * 4
    assert resident() - before < 30 << 20
    whole = torch.empty(0).set_(made, 0, (rows, width))
    assert whole[numbers].equal(kept)
    torch._lazy_clone(whole)  # torch's own memory: a run puts it back without copying it
    assert int(whole.any(-1).sum()) == len(numbers)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 8192 + 5, 1 << 22])
def test_zeros_are_zeros_also_in_memory_that_was_used(nbytes: int) -> None:
    for _ in range(3):
        used = torch.UntypedStorage(nbytes)
        torch.empty(0, dtype=torch.uint8).set_(used).fill_(255)
        del used
        made = torch.empty(0, dtype=torch.uint8).set_(zeros(nbytes))
        assert made.numel() == nbytes
        assert not made.any()
        made.fill_(255)


@pytest.mark.parametrize("damage", ["short", "number", "rows", "shape"])
def test_rows_that_do_not_fit_their_table_are_damage(damage: str) -> None:
    numbers = torch.tensor([1, 9 if damage != "number" else 10])
    data = torch.cat([torch.ones(2, 4).view(torch.uint8).reshape(-1), numbers.view(torch.uint8)])
    shape = (10, 4) if damage != "shape" else (10, 5)
    spec = TensorSpec(dtype="float32", shape=shape, stride=(shape[1], 1))
    ref = TensorRef(spec=spec, group=0, blob="x", rows=2 if damage != "rows" else -2)
    with pytest.raises(Corrupted):
        table_of(ref, data[: -8 if damage == "short" else None].clone().untyped_storage())


def test_a_collection_of_tables_keeps_rows_of_each(tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    torchrec = pytest.importorskip("torchrec")
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name]
        )
        for name in ("user", "item")
    ]
    torch.manual_seed(0)
    model = torchrec.EmbeddingBagCollection(tables=tables)
    features = torchrec.KeyedJaggedTensor(
        keys=["user", "item"], values=ids(20), lengths=torch.tensor([3, 7, 0, 10])
    )
    _, entries = traced(model, lambda m: m(features).values(), tmp_path)
    assert entries[""].metadata.table_rows == {
        "embedding_bags.user.weight": (rows_in(ids(20)[:10]), ROWS),
        "embedding_bags.item.weight": (rows_in(ids(20)[10:]), ROWS),
    }
    for entry in entries.values():
        found = grade(entry._replay())
        assert (found.level.value, found.param_grads) == ("exact", "exact"), found.reasons


class LooksUpInBatches(nn.Module):
    """Its indices are no plain tensors where the lookup sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, numbers: Tensor) -> Tensor:
        found = torch.vmap(lambda row: F.embedding(row, self.table.weight))(numbers)
        return self.scale(found)


def test_a_lookup_that_cannot_be_noted_keeps_the_table_whole(tmp_path: Path) -> None:
    _, entries = traced(LooksUpInBatches(), lambda m: m(ids(5, 6)), tmp_path)
    assert not entries[""].metadata.table_rows
    assert all(grade(entry._replay()).level == "exact" for entry in entries.values())


class FreesItsTable(nn.Module):
    """Writes to its table past the counter, then frees its memory, as a sharding framework does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table().requires_grad_(False)

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.table(numbers)
        self.table.weight.data.mul_(0.5)
        self.table.weight.untyped_storage().resize_(0)
        return found


def test_a_table_whose_memory_is_freed_in_the_forward_harms_nobody(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FreesItsTable()
    wanted = copy.deepcopy(model)(X)
    with ml.trace(model, name="m") as trace:
        assert model(X).equal(wanted)
    entries = {e.fqn: e for e in ml.Repo(tmp_path).add(trace, verify=False)}
    assert entries["table"].check().status is ml.Status.EXACT


def test_what_goes_wrong_with_tables_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("no pages")

    monkeypatch.setattr(Snapshots, "release_tables", broken)
    model = table()
    with ml.trace(model) as trace:
        model(X)
    assert any("no pages" in text for text in trace.warnings)
