"""Encoders with decoders: translation and summaries, and their two caches."""

from __future__ import annotations

from typing import Any

from tests.models.zoo.architecture import (
    TOKENS,
    VOCABULARY,
    Architecture,
    generated,
    pretrained,
    tokens,
    translation_loss,
)
from torch import Tensor, nn

FAMILY = "encoder-decoder"
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    **TOKENS,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def translation(model: nn.Module) -> Tensor:
    """Three tokens after a source."""
    return generated(model, input_ids=tokens(3))


def long_translation_loss(model: nn.Module) -> Tensor:
    """The same with a source that is long enough for sparse attention."""
    return model(input_ids=tokens(3, length=48), labels=tokens(4, length=7)).loss


def long_translation(model: nn.Module) -> Tensor:
    """Three tokens after such a source."""
    return generated(model, input_ids=tokens(3, length=48))


def translator(name: str, prefix: str, head: str, sizes: dict[str, Any]) -> Architecture:
    """A conditional language model of transformers."""
    build = pretrained(f"{prefix}{head}", f"{prefix}Config", **sizes)
    return Architecture(name, FAMILY, build, translation_loss, translation, prompts=1)


CONDITIONAL = "ForConditionalGeneration"
ARCHITECTURES = [
    Architecture(
        "bigbird-pegasus",
        FAMILY,
        pretrained(
            f"BigBirdPegasus{CONDITIONAL}",
            "BigBirdPegasusConfig",
            **BART,
            block_size=4,
            num_random_blocks=1,
        ),
        long_translation_loss,
        long_translation,
        prompts=1,
    ),
    translator("t5", "T5", CONDITIONAL, T5),
    translator("umt5", "UMT5", CONDITIONAL, T5),
    translator("longt5", "LongT5", CONDITIONAL, {**T5, "local_radius": 3, "global_block_size": 4}),
    translator("bart", "Bart", CONDITIONAL, BART),
    translator("pegasus", "Pegasus", CONDITIONAL, BART),
    translator("marian", "Marian", "MTModel", {**BART, "decoder_vocab_size": VOCABULARY}),
    translator(
        "led",
        "LED",
        CONDITIONAL,
        {
            **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    translator(
        "prophetnet",
        "ProphetNet",
        CONDITIONAL,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            **TOKENS,
        },
    ),
]
