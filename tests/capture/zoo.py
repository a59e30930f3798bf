"""Tiny modules, each named by the one property it carries. Knows no tracer and no repo."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import random
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mode(enum.Enum):
    DOUBLE = "double"
    HALF = "half"


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(self.layer(x)).tanh())


class KwargsOnly(nn.Module):
    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, *, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        out = self.layer(input=x) * scale
        return out if mask is None else out.masked_fill(mask, 0.0)


class WithKwargsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = KwargsOnly(width=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=x, mask=x > 1, scale=2.0)


class InplaceOnInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class ContainerMutated(nn.Module):
    """Appends to a list and overwrites a key of a dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any], log: list[Any]) -> Tensor:
        batch["x"] = self.layer(batch["x"])
        log.append(len(log))
        return batch["x"] * len(log)


class HandsContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ContainerMutated()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner({"x": x, "note": "kept"}, [7])


class SharedChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.left = nn.Sequential(shared, nn.Tanh())
        self.right = nn.Sequential(shared, nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class KnowsParent(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.__dict__["parent"] = parent

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.parent.scale


class ParentReference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 3.0
        self.child = KnowsParent(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class ParentWeight(nn.Module):
    """Its child needs a tensor of it, which the child alone cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.child = KnowsParent(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class PlainListOfModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = [nn.Linear(4, 4), nn.BatchNorm1d(4)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in [self.first, *self.rest]:
            x = layer(x)
        return x


class NonPersistentBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(4), persistent=False)
        self.register_buffer("empty", None)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table


class PythonCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[float] = []
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        return self.layer(x) * sum(self.seen)


class CountsInChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = PythonCounter()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(self.inner(x)))


class LambdaAttribute(nn.Module):
    def __init__(self, power: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = lambda x: x**power

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class Applies(nn.Module):
    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return module(x) + module.weight.sum()


class ModuleAsArgument(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.apply_it = Applies()

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_it(self.layer, x)


class GeneratorArgument(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OwnGenerator(nn.Module):
    """Draws from a generator of its own, and from one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.stream = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor, other: torch.Generator) -> Tensor:
        noise = torch.rand(4, generator=self.stream) + torch.rand(4, generator=other)
        return self.layer(x) * noise


class HandsGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnGenerator()
        self.made = torch.Generator().manual_seed(9)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x, self.made), self.made)


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    mode: Mode = Mode.DOUBLE
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


class Result(collections.OrderedDict):  # type: ignore[type-arg]
    """Like a model output: an ordered dict whose keys are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: Batch) -> Batch:
        factor = 2 if batch.mode is Mode.DOUBLE else 0.5
        out = self.layer(batch.x) * factor
        return Batch(out, Mode.HALF, {"pair": Pair(out.sum(), None), "why": [None, "x", 1.5]})


class DataclassIO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TakesBatch()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Result:
        found = self.inner(Batch(x, extra={"size": x.shape, "dtype": x.dtype}))
        return Result(loss=found.extra["pair"].left, logits=self.last(found.x))


class Cache:
    """Grows in place, as the key-value caches of language models do."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.length = 0

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        self.length += 1
        return torch.stack(self.keys).sum(0)


class UsesCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return self.layer(cache.update(x)) / cache.length


class CacheMutated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = UsesCache(), UsesCache()

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        return self.second(self.first(self.first(x, cache), cache), cache)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.head(inner)


class SameTensorThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class WritesThroughView(nn.Module):
    """Writes to one argument and reads the other, which shows the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, window: Tensor, whole: Tensor, twice: tuple[Tensor, Tensor]) -> Tensor:
        window.add_(1.0)
        return self.layer(whole) + twice[0] + (1.0 if twice[0] is twice[1] else 0.0)


class OverlappingViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WritesThroughView()

    def forward(self, x: Tensor) -> Tensor:
        whole = x.clone()
        bias = torch.ones(1).expand(4)  # stride 0
        return self.inner(whole[:, 1:3], whole, (bias, bias))


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.to(memory_format=torch.channels_last)))


class ThreeStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(self.layer(x), 0.5)
        return kept * float(np.random.rand()) + random.random()


class DrawsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ThreeStreams()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class AutocastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layer(x)
        return self.last(x.float())


class GradModes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.student = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            seen = self.teacher(x)
        with torch.no_grad():
            kept = self.frozen(x)
        return self.student(x) + kept + seen.clone()


class CtcTrained(nn.Module):
    def __init__(self, through_module: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.loss = nn.CTCLoss(reduction="none") if through_module else None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x).log_softmax(-1).unsqueeze(1).expand(-1, 3, -1)
        targets, lengths = torch.ones(3, 2, dtype=torch.long), torch.full((3,), x.shape[0])
        loss = self.loss or functools.partial(F.ctc_loss, reduction="none")
        return loss(scores, targets, lengths, torch.full((3,), 2))


class PackedRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.5, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(1).expand(-1, 2, -1), [3, 2])
        out, _ = self.lstm(packed)
        return out.data


class OwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.rand(4))
        self.token.group = "no_decay"  # type: ignore[attr-defined]
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(2)])
        self.named = nn.ParameterDict({"a/b": nn.Parameter(torch.rand(4))})
        self.empty = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.token.group == "no_decay"
        return self.empty(x * self.scales[0] + self.scales[1]) + self.named["a/b"] + self.token


class ViewAttribute(nn.Module):
    """Keeps a view of its weight, and a tensor with a history, outside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 4))
        self.view = self.weight.detach()[2:4]

    def forward(self, x: Tensor) -> Tensor:
        self.view.mul_(1.5)
        self.memory = (x @ self.weight.t()).detach()
        return x @ self.weight.t() + self.view.sum()


class MovesItsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ViewAttribute()

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.inner(x)


class ReplacedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.forward = functools.partial(doubled, self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def doubled(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias) * 2


def add_one_before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] + 1, *args[1:])


def add_two_after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + 2


class HooksItself(nn.Module):
    """Registers hooks on its children, one of them a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_hook(self.remember)
        self.layer.register_forward_pre_hook(add_one_before)
        self.last = 0.0

    def remember(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.last = float(output.detach().sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.last


@dataclasses.dataclass(eq=False)
class DataclassModule(nn.Module):
    width: int
    act: Any = F.gelu

    def __post_init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class OwnNew(nn.Module):
    """Its `__new__` takes arguments and passes none of them on."""

    def __new__(cls, width: int, act: Any = None) -> OwnNew:
        made = super().__new__(cls)
        made.__dict__["from_new"] = width
        return made

    def __init__(self, width: int, act: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.act = act or (lambda x: x * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class StrictAttributes(nn.Module):
    """Refuses every attribute that it does not know, to be set or to be read."""

    known = frozenset({"layer", "training", "width"})

    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.layer = nn.Linear(4, 4)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self.known:
            raise AttributeError(f"no attribute {name} here")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self).get("_modules", {}):
            raise AttributeError(name)
        return super().__getattr__(name)

    @property
    def broken(self) -> int:
        raise RuntimeError("must not be probed")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class StarArguments(nn.Module):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Linear(a, b, **options) for a, b in itertools.pairwise(sizes)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ConsumesConfig(nn.Module):
    """Empties the dict and the list that its constructor is given."""

    def __init__(self, config: dict[str, Any], sizes: list[int]) -> None:
        super().__init__()
        self.act = config.pop("act")
        self.layer = nn.Linear(sizes.pop(), sizes.pop())
        self.clip = lambda x: x.clamp(max=config["limit"])

    def forward(self, x: Tensor) -> Tensor:
        return self.clip(self.act(self.layer(x)))


class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        keys = ["/tmp/evil", "a b", "Conv", "conv", "\N{SNOWMAN}", "x" * 300]
        self.parts = nn.ModuleDict({key: nn.Linear(4, 4) for key in keys})
        self.table = {"\N{SNOWMAN} $key": 1.0, 3: "three", (1, 2): None, "$tensor": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.parts.values():
            x = layer(x)
        return x * self.table["$tensor"] * self.table["\N{SNOWMAN} $key"]


class EndlessArgument:
    """Looks like an endless sequence."""

    factor = 2.0

    def __getitem__(self, index: int) -> int:
        return index

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise RuntimeError("not to be tested")


class OddArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TakesAnything()

    def forward(self, x: Tensor) -> Any:
        return self.inner(
            x,
            EndlessArgument(),
            {1, 2},
            None,
            [],
            slice(0, 2),
            act=functools.partial(F.elu, alpha=2),
        )


class TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, odd: Any, *rest: Any, act: Any) -> Any:
        out = act(self.layer(x))[rest[-1]] * odd.factor * len(rest[0])
        return {"out": out, "rest": (*rest[:-1], "done"), (1, 2): out.detach(), "nan": float("nan")}


class OpaqueOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), iter([1.0])


class ReturnsIterator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OpaqueOutput()

    def forward(self, x: Tensor) -> Tensor:
        out, factors = self.inner(x)
        return out * next(factors)


class SideChannel(nn.Module):
    """Gradient reaches the child through an attribute that is no output of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = KeepsAux()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.aux.mean()


class KeepsAux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.layer(x * 2).square()
        return self.layer(x)


class CallerWrites(nn.Module):
    """Writes into what its child returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        out[:, 0] = 0.0
        return out


class SparseAndNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.nested = TimesSparse(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)
        return self.sparse(torch.eye(3).to_sparse(), x) + self.nested(jagged).values().sum()


class TimesSparse(nn.Module):
    def forward(self, table: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(table, x)


class LowPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.rand(4).to(torch.float8_e4m3fn))
        self.wave = nn.Parameter(torch.rand(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        wave = (x.float() * self.wave).conj()
        return self.layer(x.bfloat16()).float() * self.scale.float() + ConjugateOf()(wave)


class ConjugateOf(nn.Module):
    def forward(self, wave: Tensor) -> Tensor:
        return wave.real + wave.imag


class EmptyBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:0]).sum() + self.layer(x).sum()


class CallsAnotherMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.skipped = nn.Linear(4, 4)
        self.direct = nn.Linear(4, 4)
        self.members = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.direct.forward(x) + F.linear(x, self.used.weight)
        return self.members[0](x)


class SlowPathEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        return self.encoder(x, src_key_padding_mask=padding)


class SwitchesMode(nn.Module):
    """Runs one child in eval mode while training, and takes it back afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        self.norm.eval()
        x = self.norm(self.drop(x))
        self.norm.train()
        return x


class MomentumEncoder(nn.Module):
    """Writes deep into its child right before it calls it, and again right after."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(CalledTwice(), nn.BatchNorm1d(4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        online = self.online(x)
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for mine, other in pairs:
                mine.lerp_(other, 0.25)
            target = self.target(x)
            self.target[1].running_mean.zero_()
            self.target[0].drop.p = 0.1
        return online + target


class SwitchesModeBelow(nn.Module):
    """Runs one child in eval mode, with all that is below it, and then in training."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(CalledTwice(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.block.eval()
        x = self.block(x)
        self.block.train()
        return self.block(x)


class TunesBelow(nn.Module):
    """Its forward sets what its grandchild does, after it was called as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SwitchesModeBelow()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.block[1].p = 0.25
        x = self.inner(x)
        self.inner.block[0].layer.weight.data.mul_(0.5)
        self.inner.block[1].p = 0.75
        return x


class SavesItself(nn.Module):
    """Copies itself inside its own forward, as moving averages of weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        twin = copy.deepcopy(self.layer)
        return self.layer(x) + twin(x).detach()


class Raises(nn.Module):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.error is not None:
            raise self.error
        return x


class CatchesInside(nn.Module):
    """A child raises and the parent goes on without it."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = Raises(ValueError("inside"))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            self.fails(x)
        return self.layer(x)


class Unregistered(nn.Module):
    """Keeps what trains where neither an optimizer nor a state dict looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))]
        self.by_name = {"a": nn.Linear(4, 4)}
        self.pair = (nn.Parameter(torch.rand(4)), 1.0)
        self.kept = nn.Linear(4, 4)
        self.alias = [self.kept]
        self.__dict__["hidden"] = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for head in (*self.heads, self.by_name["a"], self.hidden, self.alias[0]):
            x = head(x)
        return x * self.pair[0]


class WaitedAt(nn.Module):
    """Holds one of everything that threads wait at."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier, self.lock = threading.Barrier(1), threading.RLock()
        self.event, self.condition = threading.Event(), threading.Condition()
        self.few, self.fewer = threading.Semaphore(2), threading.BoundedSemaphore(2)
        self.local = threading.local()
        self.twice = [self.event, self.event]
        self.event.set()

    def forward(self, x: Tensor) -> Tensor:
        self.local.x = x
        with self.lock, self.few, self.fewer, self.condition:
            self.barrier.wait(timeout=20)
        assert self.event.wait(20)
        return self.local.x * (2 if self.twice[0] is self.twice[1] is self.event else 3)
