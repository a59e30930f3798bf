"""The part of the zoo that tests run, chosen over families and modes."""

from __future__ import annotations

from tests.models.harness import Case
from tests.models.zoo.modes import MODES
from tests.models.zoo.registry import FILES, named, zoo

#: library -> architecture -> modes.
SUBSET = {
    "torch": {
        "unet": "checkpoint",
        "vae": "eval",
        "translator": "train eval",
        "encoder-layers": "checkpoint compile",
        "lstm": "train",
        "cells": "bf16",
        "parametrized": "train",
        "alignment": "train",
        "branches": "compile",
        "collector": "train eval",
        "quantized": "eval",
    },
    "transformers": {
        "llama": "train eval bf16 checkpoint compile",
        "bert": "train checkpoint compile",
        "t5": "bf16",
        "bart": "eval",
        "mixtral": "train compile",
        "jamba": "eval",
        "wav2vec2": "train",
        "whisper": "eval",
        "swin": "train",
        "vit": "bf16",
        "clip": "train",
        "paligemma": "eval",
        "patchtst": "train",
    },
    "torchrec": {
        "dlrm": "train bf16",
        "dlrm-shared-table": "train",
        "position-weights": "train",
        "sequence-tables": "train",
    },
    "torch_geometric": {"gat": "train", "top-k-pool": "bf16"},
}
RUNS = {
    f"{name}, {mode}": library
    for library, models in SUBSET.items()
    for name, modes in models.items()
    for mode in modes.split()
}


def cases() -> list[Case]:
    """Those whose library is installed, named as in `RUNS`."""
    architectures, missing = zoo()
    absent = {FILES[file] for file in missing}
    there = (run.split(", ") for run, library in RUNS.items() if library not in absent)
    return [MODES[mode](*named([name], architectures)) for name, mode in there]
