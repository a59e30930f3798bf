"""Models of time series."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.zoo.architecture import Architecture, pretrained, uniform
from torch import Tensor, nn

FAMILY = "time series"
PATCHED = {
    "num_input_channels": 2,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 24,
}
WITH_LAGS = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}


def forecast_loss(model: nn.Module) -> Tensor:
    """Error of the values to come."""
    return model(past_values=uniform(8, 2, 16, 2), future_values=uniform(9, 2, 4, 2)).loss


def likelihood_loss(model: nn.Module) -> Tensor:
    """Likelihood of the values to come, under a distribution that the model parametrises."""
    return model(
        past_values=uniform(8, 2, 15),
        past_time_features=uniform(9, 2, 15, 1),
        past_observed_mask=torch.ones(2, 15),
        future_values=uniform(10, 2, 4),
        future_time_features=uniform(11, 2, 4, 1),
    ).loss


def series(name: str, prefix: str, loss: Any, **sizes: Any) -> Architecture:
    """A forecast of transformers, whose classes begin with `prefix`."""
    return Architecture(
        name, FAMILY, pretrained(f"{prefix}ForPrediction", f"{prefix}Config", **sizes), loss
    )


ARCHITECTURES = [
    series("patchtst", "PatchTST", forecast_loss, **PATCHED),
    series("patchtsmixer", "PatchTSMixer", forecast_loss, **PATCHED),
    series("informer", "Informer", likelihood_loss, **WITH_LAGS),
    series("autoformer", "Autoformer", likelihood_loss, **WITH_LAGS, label_length=4),
]
