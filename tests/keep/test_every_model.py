"""Every module of the zoos runs on made-up inputs and weights, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tests.capture.cases import CASES
from tests.capture.loop import add_unverified, build, run
from tests.keep.loop import SHAPES

import modulelens as ml
from modulelens.errors import NotRebuildable
from modulelens.records import Status, tensor_refs
from modulelens.tree import tensors_of
from modulelens.verify import grade

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Lazy modules:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


def runs(entries: Iterable[ml.Entry], *, judged: bool) -> dict[str, str]:
    """What each entry's run on stand-ins says: empty, or the reason why it cannot be rebuilt.

    It runs forward and backward and is finite where the captured output was; the verdicts on it,
    where they are asked for, claim nothing.
    """
    found = {}
    for entry in entries:
        try:
            ready = entry._replay().ready()
        except NotRebuildable as error:
            found[entry.fqn] = error.reason
            continue
        with ready.run:
            ready.run.fresh()
            output = ready.run.forward()
            ready.run.grad_output = entry._replay().seeds(0, output)
            ready.run.backward(output)
        stats = [ref.stats for ref in tensor_refs(entry.metadata.calls[0].output) if ref.stats]
        if stats and not any(s.nans or any(s.infs) for s in stats):
            made = tensors_of(output)
            assert all(bool(t.isfinite().all()) for t in made if t.is_floating_point()), entry.fqn
        if judged and ready.synthesized:
            assert entry.check().status is Status.NOT_COMPARABLE, entry.fqn
            level = grade(entry._replay())
            assert (level.level, level.param_grads) == ("shape", None), (entry.fqn, level.reason)
        found[entry.fqn] = ""
    return found


#: These cannot be rebuilt from full captures either.
UNBUILT = {
    "HookedByStranger": {"": "foreign_hook"},
    "LazyFirstCall": {"": "uninitialized"},
    "ScriptedChild": {"": "script", "0": "script"},
}


@pytest.mark.parametrize("name", [name for name in CASES if name != "ParentWeight"])
def test_it_runs_on_stand_ins(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case)
    trace = ml.trace(model, name=name, keep=SHAPES, warmup=case.warmup)
    run(case, model, trace)
    before = torch.get_rng_state()
    found = runs(add_unverified(trace, tmp_path), judged=True)
    assert torch.get_rng_state().equal(before)
    assert {fqn: why for fqn, why in found.items() if why} == UNBUILT.get(name, {})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("library", ["torch", "transformers", "torchrec", "torch_geometric"])
def test_every_module_of_real_models_runs_on_stand_ins(library: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing them warns of their own dependencies
        from tests.models import harness
        from tests.models.zoo.subset import RUNS, cases

        steps = [c for c in cases() if c.name.endswith((", train", ", eval"))]
    chosen = [case for case in steps if RUNS[case.name] == library]
    if not chosen:
        pytest.skip(f"{library} is not installed")
    for case in chosen:
        with ml.track_init():
            model = harness.build(case)
        trace = ml.trace(model, name=case.name, keep=SHAPES, warmup=case.warmup)
        harness.run_step(case, model, trace)
        entries = add_unverified(trace, tmp_path / case.name.replace(", ", "-"))
        found = runs(entries, judged=False)
        assert "" in found.values()
        # Lazy modules have no shapes before their first call.
        assert set(found.values()) <= {"", "uninitialized"}, (case.name, found)
