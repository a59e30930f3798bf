"""Models of pictures and words, or of sound and words."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.zoo.architecture import (
    LENGTH,
    SIZES,
    TOKENS,
    Architecture,
    generated,
    tokens,
    uniform,
)
from tests.models.zoo.decoders import GROUPED
from tests.models.zoo.vision import VIT
from torch import Tensor, nn

FAMILY = "multimodal"
IMAGE_TOKEN = 3
PATCHES = 16
TEXT = {**SIZES, **TOKENS}
PROJECTED = {"projection_dim": 16}


def images(count: int = 2) -> Tensor:
    """Pictures of 32 by 32."""
    return uniform(5, count, 3, 32, 32)


def contrastive_loss(model: nn.Module) -> Tensor:
    """Which text belongs to which picture."""
    ids = tokens(1)
    ids[:, -1] = TOKENS["eos_token_id"]
    return model(input_ids=ids, pixel_values=images(), return_loss=True).loss


def joined_ids(places: int) -> Tensor:
    """Text with places for the picture's patches."""
    pictured = torch.full((2, places), IMAGE_TOKEN)
    return torch.cat([tokens(1, 2).clamp(4), pictured, tokens(2, 6).clamp(4)], dim=1)


def described_loss(model: nn.Module) -> Tensor:
    """Loss of a text around a picture."""
    ids = joined_ids(PATCHES)
    more = {"token_type_ids": (ids != IMAGE_TOKEN).long()} if _is_paligemma(model) else {}
    return model(input_ids=ids, pixel_values=images(), labels=ids, **more).loss


def described(model: nn.Module) -> Tensor:
    """Three tokens after a picture and a text."""
    return generated(model, input_ids=joined_ids(PATCHES), pixel_values=images())


def _is_paligemma(model: nn.Module) -> bool:
    return type(getattr(model, "_orig_mod", model)).__name__.startswith("PaliGemma")


def caption_loss(model: nn.Module) -> Tensor:
    """Loss of a caption."""
    ids = tokens(1)
    return model(input_ids=ids, pixel_values=images(), labels=ids).loss


def patches_loss(model: nn.Module) -> Tensor:
    """Loss of a text around a picture of 4 by 4 patches, merged two by two."""
    return model(**patches(), labels=patches()["input_ids"]).loss


def patches() -> dict[str, Tensor]:
    """What a processor makes of two pictures: rows of flattened patches, and their grid."""
    ids = joined_ids(4)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": uniform(5, 32, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


def patched(model: nn.Module) -> Tensor:
    """Three tokens after a picture and a text."""
    return generated(model, **patches())


def question_loss(model: nn.Module) -> Tensor:
    """Loss of a class, from a picture and a question."""
    labels = torch.zeros(2, 4)
    labels[:, 1] = 1
    return model(input_ids=tokens(1), pixel_values=images(), labels=labels).loss


def document_loss(model: nn.Module) -> Tensor:
    """Loss of a class per word, from words and where they stand."""
    boxes = torch.arange(4).expand(2, LENGTH, 4) * 8
    return model(input_ids=tokens(1), bbox=boxes, labels=tokens(2, highest=5) - 3).loss


def flava_loss(model: nn.Module) -> Tensor:
    """A loss on the joint embedding."""
    found = model(input_ids=tokens(1), pixel_values=images())
    return found.multimodal_embeddings.square().mean()


def composed(model: str, config: str, **parts: Any) -> Any:
    """A class of transformers on a configuration with parts."""

    def build() -> nn.Module:
        import transformers

        made = {name: part() if callable(part) else part for name, part in parts.items()}
        return getattr(transformers, model)(getattr(transformers, config)(**made))

    return build


def config(name: str, **sizes: Any) -> Any:
    """Makes a configuration of transformers when it is called."""

    def build() -> Any:
        import transformers

        return getattr(transformers, name)(**sizes)

    return build


ARCHITECTURES = [
    Architecture(
        "clip",
        FAMILY,
        composed("CLIPModel", "CLIPConfig", text_config=TEXT, vision_config=VIT, **PROJECTED),
        contrastive_loss,
    ),
    Architecture(
        "siglip",
        FAMILY,
        composed("SiglipModel", "SiglipConfig", text_config=TEXT, vision_config=VIT),
        contrastive_loss,
    ),
    Architecture(
        "flava",
        FAMILY,
        composed(
            "FlavaModel",
            "FlavaConfig",
            text_config=SIZES,
            image_config=VIT,
            multimodal_config={k: v for k, v in VIT.items() if "size" not in k or "hid" in k},
            hidden_size=32,
            projection_dim=32,
        ),
        flava_loss,
    ),
    Architecture(
        "llava",
        FAMILY,
        composed(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            vision_config=config("CLIPVisionConfig", **VIT),
            text_config=config("LlamaConfig", **GROUPED),
            image_token_id=IMAGE_TOKEN,
            image_seq_length=PATCHES,
            vision_feature_layer=-1,
        ),
        described_loss,
        described,
        prompts=1,
    ),
    Architecture(
        "paligemma",
        FAMILY,
        composed(
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            vision_config=config("SiglipVisionConfig", **VIT),
            text_config=config("GemmaConfig", **GROUPED, head_dim=8),
            image_token_index=IMAGE_TOKEN,
            projection_dim=32,
        ),
        described_loss,
        described,
        prompts=1,
    ),
    Architecture(
        "qwen2-vl",
        FAMILY,
        composed(
            "Qwen2VLForConditionalGeneration",
            "Qwen2VLConfig",
            text_config={**GROUPED, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
            vision_config={
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 8,
            },
            image_token_id=IMAGE_TOKEN,
            vision_start_token_id=90,
            vision_end_token_id=91,
            video_token_id=92,
        ),
        patches_loss,
        patched,
        prompts=1,
    ),
    Architecture(
        "blip",
        FAMILY,
        composed(
            "BlipForConditionalGeneration",
            "BlipConfig",
            text_config={**TEXT, "encoder_hidden_size": 32, "projection_dim": 16},
            vision_config=VIT,
            **PROJECTED,
        ),
        caption_loss,
    ),
    Architecture(
        "git",
        FAMILY,
        composed(
            "GitForCausalLM",
            "GitConfig",
            **TEXT,
            vision_config={**VIT},
            num_image_with_embedding=None,
        ),
        caption_loss,
    ),
    Architecture(
        "vilt",
        FAMILY,
        composed("ViltForQuestionAnswering", "ViltConfig", **{**TEXT, **VIT}, num_labels=4),
        question_loss,
    ),
    Architecture(
        "layoutlm",
        FAMILY,
        composed("LayoutLMForTokenClassification", "LayoutLMConfig", **TEXT, num_labels=3),
        document_loss,
    ),
]
