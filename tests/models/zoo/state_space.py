"""State spaces, linear attention and recurrences, and their hybrids with attention."""

from __future__ import annotations

from typing import Any

from tests.models.zoo.architecture import (
    TOKENS,
    VOCABULARY,
    Architecture,
    continuation,
    language_loss,
    pretrained,
)
from tests.models.zoo.decoders import GROUPED

FAMILY = "state space"
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    **TOKENS,
}
HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}


def recurrent(name: str, prefix: str, **sizes: Any) -> Architecture:
    """A causal language model of transformers, whose classes begin with `prefix`."""
    build = pretrained(f"{prefix}ForCausalLM", f"{prefix}Config", **sizes)
    return Architecture(name, FAMILY, build, language_loss, continuation, prompts=1)


ARCHITECTURES = [
    recurrent("mamba", "Mamba", **MAMBA),
    recurrent("mamba2", "Mamba2", **MAMBA, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
    recurrent(
        "jamba",
        "Jamba",
        **GROUPED,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    recurrent("bamba", "Bamba", **GROUPED, **HEADS, attn_layer_indices=[1]),
    recurrent(
        "zamba2",
        "Zamba2",
        **{**GROUPED, "num_key_value_heads": 4},
        attention_head_dim=16,
        n_mamba_heads=4,
        mamba_headdim=16,
        mamba_d_state=8,
        chunk_size=8,
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"],
        use_mamba_kernels=False,
    ),
    recurrent(
        "recurrent-gemma",
        "RecurrentGemma",
        **GROUPED,
        head_dim=8,
        lru_width=32,
        attention_window_size=6,
        block_types=["recurrent", "attention"],
    ),
    recurrent(
        "qwen3-next",
        "Qwen3Next",
        **GROUPED,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    recurrent("lfm2", "Lfm2", **GROUPED, layer_types=["conv", "full_attention"]),
    recurrent(
        "rwkv",
        "Rwkv",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        attention_hidden_size=32,
        intermediate_size=48,
        context_length=64,
        **TOKENS,
    ),
]
