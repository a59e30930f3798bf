"""Tiny random transformers models and one step of each. Knows no tracing and downloads nothing."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tests.models.harness import Case, Step
from torch import Tensor, nn

VOCABULARY = 97
LENGTH = 12
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **_SIZES,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        attention_dropout=0.1,
    )
    return transformers.MixtralForCausalLM(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    return transformers.Wav2Vec2ForCTC(config)


def tokens(seed: int, length: int = LENGTH) -> Tensor:
    """Token ids, shape (2, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (2, length), generator=generator)


def language_step(model: nn.Module) -> Tensor:
    """Next-token loss on a padded batch."""
    ids = tokens(1)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def masked_step(model: nn.Module) -> Tensor:
    """Loss on a few masked positions."""
    ids, labels = tokens(2), torch.full((2, LENGTH), -100)
    labels[:, ::4] = ids[:, ::4]
    return model(input_ids=ids, labels=labels, output_hidden_states=True).loss


def translation_step(model: nn.Module) -> Tensor:
    """Loss of a target given a source."""
    return model(input_ids=tokens(3), labels=tokens(4, length=7)).loss


def speech_step(model: nn.Module) -> Tensor:
    """CTC loss on noise; masks time steps at random with numpy, in place."""
    generator = torch.Generator().manual_seed(7)
    sound = torch.rand(2, 800, generator=generator)
    labels = torch.randint(1, 30, (2, 5), generator=generator)
    return model(input_values=sound, labels=labels).loss


def cached_step(model: nn.Module) -> Tensor:
    """One more token after a prompt, whose keys and values the cache holds; the call fills it."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(input_ids=tokens(5), past_key_values=cache, use_cache=True)
        return model(input_ids=tokens(6, length=1), past_key_values=cache, use_cache=True).logits


def prefill_step(model: nn.Module) -> Tensor:
    """A prompt with an empty cache, which every layer fills."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        return model(input_ids=tokens(5), past_key_values=cache, use_cache=True).logits


def under_autocast(step: Step) -> Step:
    """The same step under bf16 autocast."""

    def autocast(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model)

    return autocast


def checkpointed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model with activation checkpointing."""

    def built() -> nn.Module:
        model = build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return built


CASES = [
    Case("llama", llama, language_step),
    Case("llama bf16", llama, under_autocast(language_step)),
    Case("llama checkpointed", checkpointed(llama), language_step),
    Case("llama prefill", llama, prefill_step, train=False),
    Case("llama cached", llama, cached_step, train=False),
    Case("bert", bert, masked_step),
    Case("bert bf16", bert, under_autocast(masked_step)),
    Case("bert checkpointed", checkpointed(bert), masked_step),
    Case("t5", t5, translation_step),
    Case("t5 bf16", t5, under_autocast(translation_step)),
    Case("mixtral", mixtral, language_step),
    Case("mixtral bf16", mixtral, under_autocast(language_step)),
    Case("wav2vec2", wav2vec2, speech_step),
]
