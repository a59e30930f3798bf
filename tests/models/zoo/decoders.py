"""Language models that read left to right, each with the cache that its generation fills."""

from __future__ import annotations

from typing import Any

from tests.models.zoo.architecture import (
    SIZES,
    TOKENS,
    VOCABULARY,
    Architecture,
    continuation,
    language_loss,
    pretrained,
)

FAMILY = "decoder"
GROUPED = {**SIZES, **TOKENS, "num_key_value_heads": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS}


def decoder(name: str, prefix: str, **sizes: Any) -> Architecture:
    """A causal language model of transformers, whose classes begin with `prefix`."""
    head = sizes.pop("head", "ForCausalLM")
    config = sizes.pop("config", f"{prefix}Config")
    build = pretrained(f"{prefix}{head}", config, **sizes)
    return Architecture(name, FAMILY, build, language_loss, continuation, prompts=1)


ARCHITECTURES = [
    decoder("gpt2", "GPT2", head="LMHeadModel", **GPT, n_positions=64),
    decoder("gptj", "GPTJ", **GPT, n_positions=64, rotary_dim=4),
    decoder("gpt-bigcode", "GPTBigCode", **GPT, n_positions=64),
    decoder(
        "gpt-neo",
        "GPTNeo",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
        **TOKENS,
    ),
    decoder("gpt-neox", "GPTNeoX", **SIZES, **TOKENS),
    decoder("llama", "Llama", **GROUPED, attention_dropout=0.1),
    decoder("mistral", "Mistral", **GROUPED, sliding_window=6),
    decoder("qwen2", "Qwen2", **GROUPED),
    decoder("qwen3", "Qwen3", **GROUPED, head_dim=8),
    decoder("gemma2", "Gemma2", **GROUPED, head_dim=8, sliding_window=6),
    decoder("gemma3", "Gemma3", config="Gemma3TextConfig", **GROUPED, head_dim=8, sliding_window=6),
    decoder("phi", "Phi", **GROUPED),
    decoder("phi3", "Phi3", **GROUPED),
    decoder("olmo2", "Olmo2", **GROUPED),
    decoder("cohere", "Cohere", **GROUPED),
    decoder("glm", "Glm", **GROUPED, head_dim=8),
    decoder("stablelm", "StableLm", **GROUPED),
    decoder("starcoder2", "Starcoder2", **GROUPED, sliding_window=6),
    decoder("bloom", "Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **TOKENS),
    decoder(
        "falcon",
        "Falcon",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        new_decoder_architecture=False,
        **TOKENS,
    ),
    decoder(
        "opt",
        "OPT",
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        **TOKENS,
    ),
    decoder("mpt", "Mpt", vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
]
