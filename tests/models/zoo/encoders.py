"""Language models that see both sides of a token."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.zoo.architecture import (
    SIZES,
    TOKENS,
    VOCABULARY,
    Architecture,
    masked_loss,
    pretrained,
    tokens,
)
from torch import Tensor, nn

FAMILY = "encoder"
BLOCKS = {"block_size": 4, "num_random_blocks": 1}
LOCAL = {**SIZES, "max_position_embeddings": 80}


def encoder(name: str, prefix: str, **sizes: Any) -> Architecture:
    """A masked language model of transformers, whose classes begin with `prefix`."""
    head = sizes.pop("head", "ForMaskedLM")
    return Architecture(
        name, FAMILY, pretrained(f"{prefix}{head}", f"{prefix}Config", **sizes), masked_loss
    )


def detection_loss(model: nn.Module) -> Tensor:
    """Loss of telling replaced tokens."""
    return model(input_ids=tokens(2), labels=torch.ones(2, 12)).loss


def bytes_loss(model: nn.Module) -> Tensor:
    """Loss of a class, from characters that are hashed in buckets."""
    ids = tokens(2, length=32, highest=200)
    return model(input_ids=ids, labels=torch.tensor([0, 1])).loss


def long_loss(model: nn.Module) -> Tensor:
    """Masked loss of a text that is long enough for sparse attention."""
    return model(input_ids=tokens(2, length=48), labels=tokens(3, length=48)).loss


def fourier_loss(model: nn.Module) -> Tensor:
    """Masked loss of a model that takes no mask of attention."""
    return model(input_ids=tokens(2), labels=tokens(3)).loss


ARCHITECTURES = [
    encoder("bert", "Bert", **SIZES),
    encoder("roberta", "Roberta", **SIZES),
    encoder("albert", "Albert", **SIZES, embedding_size=16),
    encoder(
        "deberta-v2",
        "DebertaV2",
        **SIZES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        conv_kernel_size=3,
    ),
    encoder("mpnet", "MPNet", **SIZES),
    encoder("mobilebert", "MobileBert", **SIZES, embedding_size=16, intra_bottleneck_size=16),
    encoder("squeezebert", "SqueezeBert", **SIZES, embedding_size=32),
    encoder("convbert", "ConvBert", **SIZES, embedding_size=32),
    encoder("roformer", "RoFormer", **SIZES),
    encoder(
        "modernbert",
        "ModernBert",
        **SIZES,
        **TOKENS,
        cls_token_id=1,
        sep_token_id=2,
        global_attn_every_n_layers=2,
        local_attention=8,
    ),
    encoder("longformer", "Longformer", **LOCAL, attention_window=4),
    Architecture(
        "bigbird",
        FAMILY,
        pretrained("BigBirdForMaskedLM", "BigBirdConfig", **SIZES, **BLOCKS),
        long_loss,
    ),
    encoder(
        "distilbert",
        "DistilBert",
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=48,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    encoder(
        "xlm",
        "XLM",
        head="WithLMHeadModel",
        vocab_size=VOCABULARY,
        emb_dim=32,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=64,
    ),
    encoder(
        "funnel",
        "Funnel",
        vocab_size=VOCABULARY,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
    ),
    Architecture(
        "electra",
        FAMILY,
        pretrained("ElectraForPreTraining", "ElectraConfig", **SIZES, embedding_size=16),
        detection_loss,
    ),
    Architecture(
        "fnet", FAMILY, pretrained("FNetForMaskedLM", "FNetConfig", **SIZES), fourier_loss
    ),
    Architecture(
        "canine",
        FAMILY,
        pretrained(
            "CanineForSequenceClassification",
            "CanineConfig",
            **{**SIZES, "max_position_embeddings": 128},
            num_hash_buckets=32,
            local_transformer_stride=8,
        ),
        bytes_loss,
    ),
    encoder(
        "reformer",
        "Reformer",
        head="ForMaskedLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        attention_head_size=8,
        num_attention_heads=4,
        feed_forward_size=48,
        attn_layers=["local", "lsh"],
        axial_pos_shape=[4, 3],
        axial_pos_embds_dim=[16, 16],
        num_buckets=4,
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        is_decoder=False,
        max_position_embeddings=12,
    ),
]
