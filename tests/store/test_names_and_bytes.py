"""Names and values that other tools trip over: they come back as they were, and are searchable."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modulelens as ml


def stored(model: nn.Module, root: Path, *inputs: Any, name: str = "net") -> dict[str, ml.Entry]:
    with ml.trace(model, name=name) as trace:
        model(*inputs)
    return {entry.fqn: entry for entry in ml.Repo(root).add(trace, verify=False)}


class Named(nn.Module):
    """Children of any names, called in turn."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.inner = nn.ModuleDict()
        for name in names:
            self.inner._modules[name] = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.inner.values():
            x = child(x)
        return x


NAMES = [
    *(
        "/etc/evil",
        "a/b c\n",
        "../../x",
        "Conv",
        "conv",
        "\N{LATIN SMALL LETTER E WITH ACUTE}" * 120,
    ),
    *(unicodedata.normalize("NFD", "\N{LATIN SMALL LETTER E WITH ACUTE}"), "\u202eabc", "\x1b[31m"),
    *("\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{PILE OF POO}", "x" * 3000, "$(reboot)", "a@v1"),
]


def test_any_name_comes_back_and_is_found_exactly(tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.parent.iterdir())
    model = Named(*NAMES)
    stored(model, tmp_path / "repo", torch.ones(1, 2))
    repo = ml.Repo(tmp_path / "repo")
    for name in NAMES:
        (entry,) = repo.find({"fqn": f"inner.{name}"})
        assert entry.fqn == f"inner.{name}"
        assert repo[entry.name].id == entry.id
        weight = model.inner._modules[name].weight  # type: ignore[union-attr]
        assert torch.equal(entry.rebuild().weight, weight)
    longest = max(len(path.name) for path in (tmp_path / "repo").rglob("*"))
    assert longest <= 64
    assert sorted(path.name for path in tmp_path.parent.iterdir()) == before
    assert repo.fsck().ok


def test_a_name_that_no_json_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    model = Named("plain")
    with pytest.raises(ml.errors.UsageError, match="ud800"):
        stored(model, tmp_path / "repo", torch.ones(1, 2), name="\ud800")


class Clip(nn.Module):
    """Limits, one of them infinite, and a config that JSON does not know."""

    def __init__(self, high: float, config: dict[Any, Any]) -> None:
        super().__init__()
        self.high, self.config = high, config
        self.linear = nn.Linear(2, 2, dtype=config["sub"]["dtype"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).clamp(max=self.high)


def test_values_that_json_lacks(tmp_path: Path) -> None:
    config = {
        "sub": {"dtype": torch.float32, "n": np.int64(3), "device": torch.device("cpu")},
        ("a", 1): torch.Size([2]),
        "nan": math.nan,
        "half": np.float32(0.5),
        "path": Path("/a/b"),
        2**70: -(2**80),
    }
    with ml.track_init():
        model = Clip(math.inf, config)
    entry = stored(model, tmp_path / "repo", torch.ones(1, 2))[""]

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (tmp_path / "repo" / "entries" / entry.id / "metadata.json").read_text()
    assert json.loads(text, parse_constant=refuse)["fqn"] == ""
    for strategy in ("init", "structure"):
        made: Any = entry.rebuild(strategy=strategy)
        assert made.high == math.inf
        assert math.isnan(made.config["nan"])
        assert {k: v for k, v in made.config.items() if k != "nan"} == {
            k: v for k, v in config.items() if k != "nan"
        }
        assert type(made.config["sub"]["n"]) is np.int64
        assert type(made.config["half"]) is np.float32
        assert made.config["sub"]["dtype"] is torch.float32
    assert ml.Repo(tmp_path / "repo").find({"cls": "Clip"})


class Twins(nn.Module):
    """Buffers of equal bytes and different meaning, and of equal value and different bytes."""

    def __init__(self) -> None:
        super().__init__()
        payload = torch.tensor([0x7FC00001, 0x7FC00002, -0x400000], dtype=torch.int32)
        for name, value in {
            "floats": torch.zeros(3, 4),
            "ints": torch.zeros(2, 6, dtype=torch.int32),
            "wide": torch.zeros(2, 3, dtype=torch.float64),
            "same": torch.zeros(3, 4),
            "column": torch.zeros(4, 3).t(),
            "plus": torch.tensor([0.0]),
            "minus": torch.tensor([-0.0]),
            "nans": payload.view(torch.float32),
        }.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.plus


def test_equal_bytes_are_kept_once_and_stay_apart(tmp_path: Path) -> None:
    model = Twins()
    entry = stored(model, tmp_path / "repo", torch.ones(1))[""]
    made = entry.rebuild()
    for name, old in model.named_buffers():
        new = made.get_buffer(name)
        assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride()), name
        bits = [t.contiguous().view(torch.uint8) for t in (old, new)]
        assert torch.equal(*bits), name
    assert 1 / made.get_buffer("minus") == -math.inf
    made.get_buffer("floats").add_(1)
    assert not made.get_buffer("same").any()
    assert not made.get_buffer("ints").any()
