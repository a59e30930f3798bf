"""Language models with mixtures of experts. Routers' logits reach the loss through hooks."""

from __future__ import annotations

from tests.models.zoo.architecture import (
    VOCABULARY,
    Architecture,
    continuation,
    generated,
    language_loss,
    pretrained,
    tokens,
    translation_loss,
)
from tests.models.zoo.decoders import GROUPED
from torch import Tensor, nn

FAMILY = "experts"


def experts(name: str, prefix: str, **sizes: object) -> Architecture:
    """A causal language model with experts, whose classes begin with `prefix`."""
    build = pretrained(f"{prefix}ForCausalLM", f"{prefix}Config", **sizes)
    infer = routed_continuation if "output_router_logits" in sizes else continuation
    return Architecture(name, FAMILY, build, language_loss, infer, prompts=1)


def routed_continuation(model: nn.Module) -> Tensor:
    """Three tokens; the auxiliary loss, which knows no cache, is left out."""
    return generated(model, input_ids=tokens(6), output_router_logits=False)


def translation(model: nn.Module) -> Tensor:
    """Three tokens after a source."""
    return generated(model, input_ids=tokens(3))


ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True}
SMALL = {"moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

ARCHITECTURES = [
    experts("mixtral", "Mixtral", **GROUPED, **ROUTED, num_local_experts=4, attention_dropout=0.1),
    experts(
        "qwen2-moe",
        "Qwen2Moe",
        **GROUPED,
        **ROUTED,
        **SMALL,
        num_experts=4,
        shared_expert_intermediate_size=16,
    ),
    experts("olmoe", "Olmoe", **GROUPED, **ROUTED, num_experts=4),
    experts(
        "deepseek-v3",
        "DeepseekV3",
        **{**GROUPED, "num_key_value_heads": 4},
        **SMALL,
        **LATENT,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
    experts(
        "gpt-oss", "GptOss", **GROUPED, **ROUTED, head_dim=8, num_local_experts=4, sliding_window=6
    ),
    experts("granite-moe", "GraniteMoe", **GROUPED, **ROUTED, num_local_experts=4),
    Architecture(
        "switch",
        FAMILY,
        pretrained(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=4,
            decoder_start_token_id=0,
        ),
        translation_loss,
        translation,
        prompts=1,
    ),
]
