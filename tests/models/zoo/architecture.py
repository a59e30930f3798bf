"""What an architecture of the zoo is: a model, a training step and an inference.

Knows no library of models and no tracing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

Build = Callable[[], nn.Module]
Step = Callable[[nn.Module], Tensor]

VOCABULARY = 97
LENGTH = 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
#: The modes in which a model has to learn.
TRAINING = ("train", "bf16", "checkpoint", "compile")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A tiny random model and what is done with it.

    `loss` is the training step up to its loss; `infer` what is computed in eval mode without
    gradients (None: the loss), whose first `prompts` forwards are not the one to look at.
    `without` says why a mode does not apply.
    """

    name: str
    family: str
    build: Build
    loss: Step
    infer: Step | None = None
    prompts: int = 0
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)


def pretrained(model: str, config: str, **sizes: Any) -> Build:
    """A class of transformers on a configuration of random weights."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes))

    return build


def tokens(seed: int, length: int = LENGTH, highest: int = VOCABULARY) -> Tensor:
    """Token ids from 3 on, shape (2, length); 0 to 2 are special."""
    return torch.randint(3, highest, (2, length), generator=_generator(seed))


def uniform(seed: int, *shape: int) -> Tensor:
    """Numbers in [0, 1)."""
    return torch.rand(shape, generator=_generator(seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def language_loss(model: nn.Module) -> Tensor:
    """Next-token loss on a padded batch."""
    ids = tokens(1)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def masked_loss(model: nn.Module) -> Tensor:
    """Loss on a few masked positions of a padded batch."""
    ids, labels = tokens(2), torch.full((2, LENGTH), -100)
    labels[:, ::4] = ids[:, ::4]
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True).loss


def translation_loss(model: nn.Module) -> Tensor:
    """Loss of a target given a source."""
    return model(input_ids=tokens(3), labels=tokens(4, length=7)).loss


def image_loss(model: nn.Module) -> Tensor:
    """Loss of two images' classes."""
    return model(pixel_values=uniform(5, 2, 3, 32, 32), labels=torch.tensor([0, 1])).loss


def hidden_loss(model: nn.Module) -> Tensor:
    """A loss on the last hidden state of two images, for models without a head."""
    found = model(pixel_values=uniform(5, 2, 3, 32, 32))
    return found.last_hidden_state.float().square().mean()


def generated(model: nn.Module, **inputs: Any) -> Tensor:
    """Logits of three sampled tokens: a prompt's forward, then two with a filled cache."""
    found = model.generate(
        **inputs,
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(found.logits)


def continuation(model: nn.Module) -> Tensor:
    """Three tokens after a padded prompt."""
    ids = tokens(6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return generated(model, input_ids=ids, attention_mask=mask)
