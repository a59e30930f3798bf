"""Models made of torch.nn's own layers, named by what is special in them. Knows no tracing."""

from __future__ import annotations

import torch
from tests.models.zoo.architecture import VOCABULARY, Architecture, tokens, uniform
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

FAMILY = "torch.nn"


class Translator(nn.Module):
    """torch's whole transformer, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        found = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=source == 3,
            tgt_is_causal=True,
        )
        return self.head(found)


class Encoder(nn.Module):
    """Encoder layers, which torch fuses in eval mode; `checkpointing` recomputes each."""

    def __init__(self, *, norm_first: bool = False) -> None:
        super().__init__()
        self.checkpointing = False
        self.embed = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        if self.checkpointing and self.training:
            for layer in self.encoder.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
        else:
            hidden = self.encoder(hidden)
        return self.head(hidden.mean(dim=1))


class Tagger(nn.Module):
    """A recurrent network on packed sequences."""

    def __init__(self, kind: type[nn.RNNBase], **options: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.recurrent = kind(
            12, 8, 2, batch_first=True, bidirectional=True, dropout=0.2, **options
        )
        self.head = nn.LazyLinear(4)

    def forward(self, ids: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(ids), torch.tensor([12, 7]), batch_first=True, enforce_sorted=False
        )
        hidden, _ = self.recurrent(packed)
        padded, _ = pad_packed_sequence(hidden, batch_first=True)
        return self.head(padded.mean(dim=1))


class Cells(nn.Module):
    """Cells called in a loop, so many times each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(6, 8), nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, hidden = None, torch.zeros(x.shape[0], 8)
        for moment in x[:, ::2].unbind(1):
            state = self.first(moment, state)
            hidden = self.second(state[0], hidden)
        return self.head(hidden)


class CrossAttention(nn.Module):
    """Attention with other keys, added biases, and its weights as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.MultiheadAttention(
            16, 4, dropout=0.1, kdim=6, vdim=6, add_bias_kv=True, batch_first=True
        )
        self.again = nn.MultiheadAttention(16, 4, add_zero_attn=True, batch_first=True)
        self.head = nn.Bilinear(16, 4, 4)
        self.query = nn.Parameter(torch.randn(1, 3, 16))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(x.shape[0], -1, -1)
        hidden, weights = self.look(query, x, x, average_attn_weights=False)
        hidden, _ = self.again(hidden, hidden, hidden, need_weights=False)
        return self.head(hidden[:, 0], weights[:, :, 0, :4].mean(dim=1))


def residual(norm: type[nn.Module], *sizes: int) -> nn.Module:
    """A small convolutional network with the norm that is asked for."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        norm(*sizes, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=4, padding_mode="reflect"),
        nn.Hardswish(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def parametrized() -> nn.Module:
    """Weights that are computed from others before each call."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 8, 3, stride=4)),
        nn.LeakyReLU(0.1, inplace=True),
        parametrizations.spectral_norm(nn.Conv2d(8, 8, 3)),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        parametrizations.orthogonal(nn.Linear(32, 8)),
        nn.PReLU(),
        nn.Linear(8, 4),
    )


def volumes() -> nn.Module:
    """Three dimensions, transposed convolutions, padding and upsampling."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv3d(1, 4, (1, 3, 3), stride=(1, 2, 2)),
        nn.InstanceNorm3d(4, affine=True, track_running_stats=True),
        nn.ELU(),
        nn.ConvTranspose3d(4, 2, 2, stride=2),
        nn.Upsample(scale_factor=0.5),
        nn.ReplicationPad3d(1),
        nn.AvgPool3d(2),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


class Bags(nn.Module):
    """Bags of ids by offsets, and a softmax of clusters that returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 12, mode="sum", include_last_offset=True)
        self.hidden = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.LayerNorm(12))
        self.classes = nn.AdaptiveLogSoftmaxWithLoss(12, 20, cutoffs=[4, 10])

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        return self.classes(self.hidden(self.bag(ids, offsets, weights)), labels).loss


class Speech(nn.Module):
    """One-dimensional convolutions and a loss module for alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Sequential(
            nn.Conv1d(1, 8, 8, stride=4), nn.BatchNorm1d(8), nn.GLU(dim=1), nn.Conv1d(4, 10, 3)
        )
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
        scores = self.waves(sound).permute(2, 0, 1).log_softmax(-1)
        frames = torch.full((sound.shape[0],), scores.shape[0])
        return self.loss(scores, labels, frames, torch.tensor([4, 3]))


class Branches(nn.Module):
    """Containers of all kinds, a module used twice, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.ways = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(6, 4)})
        self.scales = nn.ParameterDict({"up": nn.Parameter(torch.ones(8))})
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(4))])
        self.spare = nn.Linear(1, 1)
        self.head = nn.Sequential(nn.RMSNorm(12), nn.Softplus(), nn.Linear(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(x.mean(dim=1)).tanh())
        up = self.ways["up"](x) * self.scales["up"]
        down = self.ways["down"](x) + self.shifts[0]
        return self.head(torch.cat([up, down], dim=-1))


COLLECTED: list[Tensor] = []


class Collector(nn.Module):
    """Collects what its layers give by hooks, which its first call installs for good."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
        self._output_capturing_hooks_installed = False

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        if not self._output_capturing_hooks_installed:
            for place, layer in enumerate(self.layers):
                collect_from(layer, place)
            self._output_capturing_hooks_installed = True
        COLLECTED.clear()
        scores = self.layers(x.mean(dim=1))
        return scores, list(COLLECTED)


def collect_from(layer: nn.Module, place: int) -> None:
    """Hooks a closure to a layer."""

    def collect(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if place == 0:
            COLLECTED.append(args[0])
        COLLECTED.append(output)

    layer.register_forward_hook(collect)


def quantized() -> nn.Module:
    """Linear layers with packed int8 weights."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 4))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def ids_loss(model: nn.Module) -> Tensor:
    """Loss of a class, from token ids."""
    return _classified(model(tokens(1)))


def pair_loss(model: nn.Module) -> Tensor:
    """Loss of a target given a source."""
    source, target = tokens(3), tokens(4, length=7)
    scores = model(source, target[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten())


def series_loss(model: nn.Module) -> Tensor:
    """Loss of a class, from 12 moments of 6 numbers."""
    return _classified(model(uniform(8, 2, 12, 6)))


def collected_loss(model: nn.Module) -> Tensor:
    """A loss on scores and on all that was collected."""
    scores, seen = model(uniform(8, 2, 12, 6))
    return _classified(scores) + sum(one.float().square().mean() for one in seen)


def collected_again(model: nn.Module) -> Tensor:
    """The same from a second call, which finds the hooks of the first one."""
    collected_loss(model)
    return collected_loss(model)


def picture_loss(model: nn.Module) -> Tensor:
    """Loss of a class, from a picture."""
    return _classified(model(uniform(5, 2, 3, 32, 32)))


def bags_loss(model: nn.Module) -> Tensor:
    """The model's own loss on bags of ids."""
    ids = tokens(1).flatten()
    return model(ids, torch.tensor([0, 5, 5, 24]), uniform(2, 24), torch.tensor([1, 7, 15]))


def sound_loss(model: nn.Module) -> Tensor:
    """The model's own loss on a wave."""
    return model(uniform(7, 2, 1, 100), tokens(7, 4, 10))


def _classified(scores: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.float(), torch.tensor([0, 3]))


ARCHITECTURES = [
    Architecture("translator", FAMILY, Translator, pair_loss),
    Architecture("encoder-layers", FAMILY, Encoder, ids_loss),
    Architecture("encoder-norm-first", FAMILY, lambda: Encoder(norm_first=True), ids_loss),
    Architecture("lstm", FAMILY, lambda: Tagger(nn.LSTM, proj_size=6), ids_loss),
    Architecture("gru", FAMILY, lambda: Tagger(nn.GRU), ids_loss),
    Architecture("cells", FAMILY, Cells, series_loss),
    Architecture("attention", FAMILY, CrossAttention, series_loss),
    Architecture("batch-norm", FAMILY, lambda: residual(nn.BatchNorm2d), picture_loss),
    Architecture("group-norm", FAMILY, lambda: residual(nn.GroupNorm, 4), picture_loss),
    Architecture("parametrized", FAMILY, parametrized, picture_loss),
    Architecture("volumes", FAMILY, volumes, picture_loss),
    Architecture("bags-softmax", FAMILY, Bags, bags_loss),
    Architecture("alignment", FAMILY, Speech, sound_loss),
    Architecture("branches", FAMILY, Branches, series_loss),
    Architecture("collector", FAMILY, Collector, collected_loss, collected_again, prompts=1),
    Architecture(
        "quantized",
        FAMILY,
        quantized,
        series_loss,
        without=dict.fromkeys(
            ("train", "bf16", "checkpoint", "compile"), "its weights are integers"
        ),
    ),
]
