"""Models that hear: waves, spectrograms, codecs."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.zoo.architecture import (
    TOKENS,
    Architecture,
    generated,
    pretrained,
    tokens,
    uniform,
)
from tests.models.zoo.sequences import BART
from torch import Tensor, nn

FAMILY = "audio"
WAVES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def speech_loss(model: nn.Module) -> Tensor:
    """CTC loss on noise; masks time steps at random with numpy, in place."""
    return model(input_values=uniform(7, 2, 800), labels=tokens(7, 5, 30)).loss


def hears(name: str, prefix: str, **sizes: Any) -> Architecture:
    """A CTC model on raw waves, whose classes begin with `prefix`."""
    build = pretrained(f"{prefix}ForCTC", f"{prefix}Config", **{**WAVES, **sizes})
    return Architecture(name, FAMILY, build, speech_loss)


def features_loss(model: nn.Module) -> Tensor:
    """CTC loss on filter banks."""
    return model(input_features=uniform(7, 2, 40, 160), labels=tokens(7, 5, 30)).loss


def transcription_loss(model: nn.Module) -> Tensor:
    """Loss of a text, from a spectrogram."""
    return model(input_features=uniform(7, 2, 16, 64), labels=tokens(4, 7)).loss


def transcription(model: nn.Module) -> Tensor:
    """Three tokens after a spectrogram."""
    return generated(model, input_features=uniform(7, 2, 16, 64))


def spectrogram_loss(model: nn.Module) -> Tensor:
    """Loss of a class, from a spectrogram."""
    return model(input_values=uniform(7, 2, 64, 32), labels=torch.tensor([0, 1])).loss


def codec_loss(model: nn.Module) -> Tensor:
    """Error of a wave after its codec; the codebook takes the nearest entries."""
    wave = uniform(7, 2, 1, 640)
    return (model(input_values=wave).audio_values - wave).square().mean()


def speech_text_loss(model: nn.Module) -> Tensor:
    """Loss of a text, from filter banks."""
    return model(input_features=uniform(7, 2, 64, 16), labels=tokens(4, 7)).loss


def spoken(model: nn.Module) -> Tensor:
    """A wave from text, through flows and a duration that is drawn."""
    return model(input_ids=tokens(3)).waveform.square().mean()


SPEECH = {
    **BART,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
}

ARCHITECTURES = [
    hears("wav2vec2", "Wav2Vec2"),
    hears("hubert", "Hubert"),
    hears("wavlm", "WavLM", num_buckets=16, max_bucket_distance=32),
    hears("sew", "SEW", squeeze_factor=2),
    hears("data2vec-audio", "Data2VecAudio", num_conv_pos_embeddings=2, conv_pos_kernel_size=5),
    hears(
        "wav2vec2-conformer",
        "Wav2Vec2Conformer",
        position_embeddings_type="rotary",
        conv_depthwise_kernel_size=5,
    ),
    Architecture(
        "whisper",
        FAMILY,
        pretrained(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **SPEECH,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        transcription_loss,
        transcription,
        prompts=1,
    ),
    Architecture(
        "speech-to-text",
        FAMILY,
        pretrained(
            "Speech2TextForConditionalGeneration",
            "Speech2TextConfig",
            **{**SPEECH, "max_source_positions": 64},
            input_feat_per_channel=16,
            conv_channels=32,
        ),
        speech_text_loss,
    ),
    Architecture(
        "ast",
        FAMILY,
        pretrained(
            "ASTForAudioClassification",
            "ASTConfig",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            patch_size=8,
            frequency_stride=8,
            time_stride=8,
            max_length=64,
            num_mel_bins=32,
        ),
        spectrogram_loss,
    ),
    Architecture(
        "encodec",
        FAMILY,
        pretrained(
            "EncodecModel",
            "EncodecConfig",
            num_filters=4,
            hidden_size=16,
            codebook_dim=16,
            codebook_size=16,
            upsampling_ratios=[4, 2],
            num_lstm_layers=1,
            target_bandwidths=[6.0, 12.0],
        ),
        codec_loss,
    ),
    Architecture(
        "dac",
        FAMILY,
        pretrained(
            "DacModel",
            "DacConfig",
            encoder_hidden_size=4,
            downsampling_ratios=[4, 2],
            decoder_hidden_size=16,
            upsampling_ratios=[4, 2],
            n_codebooks=2,
            codebook_size=16,
            codebook_dim=4,
        ),
        codec_loss,
    ),
    Architecture(
        "vits",
        FAMILY,
        pretrained(
            "VitsModel",
            "VitsConfig",
            vocab_size=97,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=24,
            flow_size=16,
            spectrogram_bins=9,
            upsample_initial_channel=16,
            upsample_rates=[4, 2],
            upsample_kernel_sizes=[8, 4],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
            prior_encoder_num_flows=2,
            prior_encoder_num_wavenet_layers=1,
            posterior_encoder_num_wavenet_layers=1,
            duration_predictor_num_flows=2,
            **TOKENS,
        ),
        spoken,
        without=dict.fromkeys(
            ("train", "bf16", "checkpoint", "compile"),
            "transformers does not train it: it raises in train mode",
        ),
    ),
]
