"""Models that see: transformers, convolutions, segmentation, detection."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.zoo.architecture import (
    Architecture,
    hidden_loss,
    image_loss,
    pretrained,
    uniform,
)
from torch import Tensor, nn

FAMILY = "vision"
VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
WINDOWS = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_channels": 3}
CLASSES = "ForImageClassification"


def vision(name: str, prefix: str, **sizes: Any) -> Architecture:
    """An image classifier of transformers, whose classes begin with `prefix`."""
    head = sizes.pop("head", CLASSES)
    build = pretrained(f"{prefix}{head}", f"{prefix}Config", **sizes)
    return Architecture(name, FAMILY, build, image_loss if head == CLASSES else hidden_loss)


def segmentation_loss(model: nn.Module) -> Tensor:
    """Loss of a class per pixel."""
    labels = torch.zeros(2, 32, 32, dtype=torch.long)
    return model(pixel_values=uniform(5, 2, 3, 32, 32), labels=labels).loss


def depth_loss(model: nn.Module) -> Tensor:
    """A loss on the predicted depth."""
    return model(pixel_values=uniform(5, 2, 3, 32, 32)).predicted_depth.square().mean()


def boxes_loss(model: nn.Module) -> Tensor:
    """A loss on classes and boxes; matching them with given ones needs more packages."""
    found = model(pixel_values=uniform(5, 2, 3, 32, 32))
    return found.logits.square().mean() + found.pred_boxes.square().mean()


def masks_loss(model: nn.Module) -> Tensor:
    """A loss on classes and masks; matching them with given ones needs more packages."""
    found = model(pixel_values=uniform(5, 2, 3, 32, 32))
    classes, masks = found.class_queries_logits, found.masks_queries_logits
    return classes.square().mean() + masks.square().mean()


def pretraining_loss(model: nn.Module) -> Tensor:
    """Loss of the patches that a random mask hides."""
    return model(pixel_values=uniform(5, 2, 3, 32, 32)).loss


def prompted_loss(model: nn.Module) -> Tensor:
    """A loss on the masks of one point per image."""
    points = torch.tensor([[[[10.0, 12.0]]], [[[20.0, 5.0]]]])
    found = model(pixel_values=uniform(5, 2, 3, 32, 32), input_points=points)
    return found.pred_masks.square().mean() + found.iou_scores.mean()


def sam() -> nn.Module:
    """Segments what a prompt points at."""
    import transformers

    config = transformers.SamConfig(
        vision_config={
            "hidden_size": 32,
            "mlp_dim": 48,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
        },
        prompt_encoder_config={
            "hidden_size": 16,
            "image_size": 32,
            "patch_size": 8,
            "mask_input_channels": 4,
        },
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 24,
            "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    )
    return transformers.SamModel(config)


def resnet_backbone() -> Any:
    """Four small stages."""
    import transformers

    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def detr() -> nn.Module:
    """Finds boxes by queries."""
    import transformers

    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=resnet_backbone(),
        num_queries=5,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_labels=3,
        auxiliary_loss=True,
    )
    return transformers.DetrForObjectDetection(config)


def deformable_detr() -> nn.Module:
    """Finds boxes by queries that look at a few places."""
    import transformers

    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=resnet_backbone(),
        num_queries=5,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_labels=3,
    )
    return transformers.DeformableDetrForObjectDetection(config)


def maskformer(prefix: str) -> nn.Module:
    """Finds masks by queries."""
    import transformers

    backbone = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=24,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=24,
        num_queries=5,
        num_labels=3,
        train_num_points=32,
    )
    return getattr(transformers, f"{prefix}ForUniversalSegmentation")(config)


def mask2former() -> nn.Module:
    """The one that masks attention."""
    return maskformer("Mask2Former")


def depth_anything() -> nn.Module:
    """Depth from a backbone of patches."""
    import transformers

    backbone = transformers.Dinov2Config(
        **VIT, mlp_ratio=2, out_indices=[1, 2], reshape_hidden_states=False
    )
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=8,
        reassemble_hidden_size=32,
        reassemble_factors=[2, 1],
        neck_hidden_sizes=[8, 16],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )
    return transformers.DepthAnythingForDepthEstimation(config)


def semantic(name: str, prefix: str, **sizes: Any) -> Architecture:
    """A model of one class per pixel."""
    build = pretrained(f"{prefix}ForSemanticSegmentation", f"{prefix}Config", **sizes)
    return Architecture(name, FAMILY, build, segmentation_loss)


ARCHITECTURES = [
    vision("vit", "ViT", **VIT),
    vision("beit", "Beit", **VIT),
    vision("dinov2", "Dinov2", **VIT),
    vision(
        "hiera",
        "Hiera",
        image_size=[32, 32],
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        patch_size=[7, 7],
        patch_stride=[4, 4],
        patch_padding=[3, 3],
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        masked_unit_attention=[True, False],
        num_query_pool=1,
    ),
    vision("swin", "Swin", **WINDOWS),
    vision("swinv2", "Swinv2", **WINDOWS),
    vision("convnextv2", "ConvNextV2", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2),
    vision("resnet", "ResNet", **STAGES),
    vision("bit", "Bit", embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4),
    vision(
        "efficientnet",
        "EfficientNet",
        image_size=32,
        width_coefficient=0.2,
        depth_coefficient=0.3,
        hidden_dim=256,
    ),
    vision("poolformer", "PoolFormer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    vision(
        "pvt",
        "Pvt",
        image_size=32,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
    ),
    vision(
        "focalnet",
        "FocalNet",
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
    ),
    vision(
        "levit",
        "Levit",
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    vision(
        "mobilevit",
        "MobileViT",
        image_size=32,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 16],
    ),
    semantic(
        "segformer",
        "Segformer",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    Architecture(
        "mae",
        FAMILY,
        pretrained(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **VIT,
            decoder_hidden_size=16,
            decoder_intermediate_size=24,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
        ),
        pretraining_loss,
    ),
    Architecture("detr", FAMILY, detr, boxes_loss),
    Architecture("deformable-detr", FAMILY, deformable_detr, boxes_loss),
    Architecture(
        "yolos",
        FAMILY,
        pretrained(
            "YolosForObjectDetection",
            "YolosConfig",
            **{**VIT, "image_size": [32, 32]},
            num_detection_tokens=5,
            num_labels=3,
        ),
        boxes_loss,
    ),
    Architecture("mask2former", FAMILY, mask2former, masks_loss),
    Architecture("depth-anything", FAMILY, depth_anything, depth_loss),
    Architecture("sam", FAMILY, sam, prompted_loss),
]
