"""Traces that keep shapes only: what is kept by value all the same, and what runs on stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture import zoo
from tests.keep.loop import SHAPES, Takes, inputs_again, traced
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import modulelens as ml
from modulelens.errors import Corrupted, NotRebuildable
from modulelens.records import Status
from modulelens.tree import tensors_of
from modulelens.verify import grade


class Bags(nn.Module):
    """Sums the rows of each bag; its offsets follow from the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=True)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        return self.table(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False, **masks)[0]


class Experts(nn.Module):
    """Routes each token to one expert; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        return torch.cat([e(x[route == k]) for k, e in enumerate(self.experts)])


class Pooled(nn.Module):
    """BatchNorm over single values per channel refuses a batch of one in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def padded(batch: int = 3, **kwargs: Any) -> PackedSequence:
    lengths = torch.arange(batch, 0, -1)[torch.randperm(batch)]
    return pack_padded_sequence(
        torch.randn(batch, batch, 3), lengths, batch_first=True, enforce_sorted=False, **kwargs
    )


def hidden(rows: int, width: int) -> Tensor:
    """True where padded; every row has something left."""
    return torch.arange(width) >= torch.randint(1, width + 1, (rows, 1))


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


def causal(n: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


STEPS: dict[str, tuple[Any, Any]] = {
    "lengths of bags": (Bags, lambda m: m(torch.randint(20, (7,)), torch.tensor([3, 0, 4]))),
    "offsets of bags": (
        lambda: nn.EmbeddingBag(20, 4),
        lambda m: m(torch.randint(20, (9,)), torch.tensor([0, 4, 4])),
    ),
    "packed sequence": (lambda: nn.LSTM(3, 4, batch_first=True), lambda m: m(padded())),
    "padding mask": (Attends, lambda m: m(torch.randn(2, 4, 8), key_padding_mask=hidden(2, 4))),
    "additive mask": (
        Attends,
        lambda m: m(torch.randn(2, 4, 8), key_padding_mask=additive(hidden(2, 4))),
    ),
    "causal mask": (
        Attends,
        lambda m: m(torch.randn(2, 5, 8), attn_mask=causal(5), is_causal=True),
    ),
    "batch of two": (Pooled, lambda m: m(torch.randn(2, 3, 8, 8))),
    "no tokens": (Experts, lambda m: m(torch.randn(5, 4), torch.tensor([0, 0, 2, 2, 0]))),
    "class targets": (
        nn.CrossEntropyLoss,
        lambda m: m(torch.randn(6, 5), torch.randint(5, (6,))),
    ),
    "probability targets": (
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda m: m(torch.randn(6, 5).log_softmax(-1), torch.randn(6, 5).softmax(-1)),
    ),
    "probability inputs": (nn.BCELoss, lambda m: m(torch.rand(30), torch.rand(30).round())),
    "positive rates": (
        nn.PoissonNLLLoss,
        lambda m: m(torch.randn(30), torch.rand(30).mul(9).round()),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_runs_on_stand_ins_as_it_did_on_its_inputs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, step = STEPS[name]
    for fqn, entry in traced(build(), step, tmp_path).items():
        ready = entry._replay().ready()
        with ready.run:
            output = ready.run.forward()
            assert all(bool(t.isfinite().all()) for t in tensors_of(output)), fqn
            ready.run.backward(output)
        assert entry.check(backward=True).status in (Status.NOT_COMPARABLE, Status.EXACT)


def test_parts_that_need_each_other_come_back_by_value(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sequence, lengths = padded(5), torch.tensor([3, 0, 4])
    mask, ids = hidden(3, 7), torch.randint(99, (4, 4))
    packed, bags, *others = inputs_again(tmp_path, sequence, lengths, mask, ids)
    assert type(packed) is PackedSequence
    assert packed.batch_sizes.equal(sequence.batch_sizes)
    assert packed.sorted_indices.equal(sequence.sorted_indices)
    assert packed.unsorted_indices.equal(sequence.unsorted_indices)
    assert not packed.data.equal(sequence.data)
    assert bags.equal(lengths)
    assert others[0].equal(mask)
    assert others[1].equal(ids)


LARGE = {
    "lengths": torch.randint(4, (300_000,)),
    "offsets": torch.randint(4, (300_000,)).cumsum(0),
    "causal mask": torch.ones(1500, 1500, dtype=torch.bool).tril(),
    "additive mask": additive(~torch.ones(600, 600, dtype=torch.bool).tril()),
    "additive mask, half": additive(~torch.ones(600, 600, dtype=torch.bool).tril()).bfloat16(),
    "one-hot": torch.eye(900)[torch.randint(900, (500,))],
    "segments": torch.arange(200).repeat_interleave(1000),
    "expanded mask": torch.ones(900, 900, dtype=torch.bool).tril().expand(64, 900, 900),
    "constant": torch.full((500, 500), 0.1),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_masks_and_indices_are_kept_compressed(name: str, tmp_path: Path) -> None:
    value = LARGE[name]
    (again,) = inputs_again(tmp_path, value)
    assert again.equal(value)
    assert again.stride() == value.stride()
    stored = sum(f.stat().st_size for f in (tmp_path / "blobs").rglob("*") if f.is_file())
    assert stored < value.untyped_storage().nbytes() / 2


def test_a_damaged_or_lying_compressed_blob_is_named(tmp_path: Path) -> None:
    mask = additive(~torch.ones(600, 600, dtype=torch.bool).tril())
    entry = traced(Takes(), lambda m: m(mask), tmp_path)[""]
    size = mask.untyped_storage().nbytes()
    record = (tmp_path / "entries" / entry.id / "metadata.json").read_bytes()
    for lie in (size - 4, size + 4):
        changed = record.replace(f'"nbytes":{size}'.encode(), f'"nbytes":{lie}'.encode())
        assert changed != record
        (tmp_path / "entries" / entry.id / "metadata.json").write_bytes(changed)
        with pytest.raises(Corrupted):
            ml.Repo(tmp_path)[entry.id].inputs()


def test_indices_too_large_to_keep_stay_in_their_table(tmp_path: Path) -> None:
    wide = torch.randint(1 << 40, (1_300_000,))
    made, other = inputs_again(tmp_path, wide, wide.view(1300, 1000))
    assert not made.equal(wide)
    assert wide.min() <= made.min()
    assert made.max() <= wide.max()
    assert other.data_ptr() == made.data_ptr()  # one memory then, one memory now


def test_arrays_of_numpy_are_kept(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(300, 400))
    again, _ = inputs_again(tmp_path, array, torch.zeros(1))
    assert np.array_equal(again, array)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors_keep_their_indices(tmp_path: Path) -> None:
    dense = torch.randn(400, 500).relu()
    sparse, compressed = inputs_again(tmp_path, dense.to_sparse(), dense.to_sparse_csr())
    assert sparse.indices().equal(dense.to_sparse().indices())
    assert compressed.col_indices().equal(dense.to_sparse_csr().col_indices())
    assert not sparse.values().equal(dense.to_sparse().values())


def test_what_shared_memory_shares_it_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    joint = torch.randn(6, 9)
    left, right = joint[:, :4], joint[:, 4:]
    rotated = torch.view_as_real(torch.randn(8, dtype=torch.complex64))
    again = inputs_again(tmp_path, joint, left, right, joint.t(), rotated, torch.randn(6, 9))
    whole, left, right, turned, _, other = again
    assert whole[:, :4].equal(left)
    assert whole[:, 4:].equal(right)
    assert whole.t().equal(turned)
    assert left.data_ptr() == whole.data_ptr()
    whole.fill_(7)
    assert bool((right == 7).all())
    assert not bool((other == 7).any())
    assert left.stride() == (9, 1)


def test_views_without_their_whole_are_filled_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    joint = torch.randn(50, 9)
    halves = inputs_again(tmp_path, joint[:, 5:], joint[:, :4], joint[1::2, 3:6])
    assert all(bool(t.isfinite().all()) and t.std() > 0.5 for t in halves)


def test_weights_of_their_kind_stay_of_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8))
    with torch.no_grad():
        model[1].running_var.copy_(torch.rand(8) * 1e-3 + 1e-6)
        model[1].running_mean.copy_(torch.randn(8) * 100)
    captured = {n: t.clone() for n, t in model.state_dict().items()}
    entry = traced(model, lambda m: m(torch.randn(6, 8)), tmp_path)[""]
    made = entry.rebuild().state_dict()
    assert made.keys() == captured.keys()
    assert made["1.num_batches_tracked"].equal(captured["1.num_batches_tracked"])
    assert bool((made["1.running_var"] > 0).all())
    assert made["2.weight"].equal(captured["2.weight"])  # a constant is kept
    assert not made["0.weight"].equal(captured["0.weight"])
    assert made["0.weight"].abs().max() <= captured["0.weight"].abs().max()
    assert entry.rebuild().training


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = zoo.TiedWeights()
    entry = traced(model, lambda m: m(torch.tensor([1, 2, 2])), tmp_path)[""]
    made = entry.rebuild()
    assert made.embed.weight is made.head.weight
    assert not made.embed.weight.equal(model.embed.weight)


def test_seeds_choose_the_inputs_and_leave_the_process_alone(tmp_path: Path) -> None:
    entry = traced(nn.Linear(4, 3), lambda m: m(torch.randn(5, 4)), tmp_path)[""]
    before = torch.get_rng_state()
    first, again, other = (entry.inputs(seed=s)[0][0] for s in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    assert entry.rebuild().weight.equal(entry.rebuild().weight)
    # A run's weights are those of `rebuild`, its inputs those of `inputs`, for every seed.
    for seed in (0, 1):
        expected = entry.rebuild()(*entry.inputs(seed=seed)[0])
        assert entry.run(seed=seed).equal(expected)
        assert entry.run(entry.rebuild(), seed=seed).equal(expected)
    assert torch.get_rng_state().equal(before)


MIXED = [
    (ml.Keep(tensors="shape", grads=True), "inputs"),
    (ml.Keep(weights="shape", grads=True), "weights"),
    (SHAPES, "weights and inputs"),
]


@pytest.mark.parametrize(("keep", "what"), MIXED)
def test_nothing_is_claimed_of_what_was_not_kept(keep: ml.Keep, what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    entry = traced(Pooled(), lambda m: m(torch.randn(2, 3, 8, 8)), tmp_path / "repo", keep)[""]
    check = entry.check(backward=True)
    assert check.status is Status.NOT_COMPARABLE
    assert check.reason == f"{what} were synthesised: there is nothing to compare with"
    found = grade(entry._replay())
    assert found.level == "shape"
    assert found.param_grads is found.input_grads is found.buffers is None
    assert set(found.reasons) == {"outputs"}
    measured = entry.benchmark(budget_s=0.02)
    assert measured.synthesized
    assert entry.profile(budget_s=0.02).synthesized
    exported = torch.load(entry.export(tmp_path / "x.pt"), weights_only=True)
    assert any(key.startswith("synthesised/") for key in exported)
    assert ("state/layers.0.weight" in exported) == ("weights" not in what)
    assert any(key.startswith("inputs/0") for key in exported) == ("inputs" not in what)


def test_an_output_that_was_not_kept_is_not_compared(tmp_path: Path) -> None:
    keep = ml.Keep(tensors="shape", grads=True)
    entry = traced(nn.Embedding(9, 4), lambda m: m(torch.tensor([1, 5])).cos(), tmp_path, keep)[""]
    check = entry.check(backward=True)
    assert check.status is Status.NOT_COMPARABLE
    assert "only the shape" in check.reason
    assert grade(entry._replay()).level == "shape"
    assert entry.benchmark(budget_s=0.02).synthesized  # the gradients that it sends back are
    assert not entry.benchmark(backward=False, budget_s=0.02).synthesized
    with pytest.raises(NotRebuildable, match="only the shape"):
        entry.grads()


def test_what_was_kept_after_all_is_compared(tmp_path: Path) -> None:
    entry = traced(nn.Flatten(), lambda m: m(torch.randint(9, (3, 4))), tmp_path)[""]
    assert entry.check().status is Status.EXACT


def test_an_input_that_is_a_weight_is_the_weight(tmp_path: Path) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4))
            self.inner = Takes()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.table, x)

    model = Scores()
    keep = ml.Keep(tensors="shape")
    entry = traced(model, lambda m: m(torch.randn(5, 4)), tmp_path, keep)["inner"]
    (table, x), _ = entry.inputs()
    assert table.equal(model.table)
    assert not x.equal(model.table)
