"""A task as Lightning wants it, around any module; in a file of its own, as it needs Lightning."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as light
import torch
from torch import Tensor, nn


class Task(light.LightningModule):  # type: ignore[misc]
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x)

    def training_step(self, x: Tensor, _number: int) -> Any:
        return self(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
