"""A small classifier, trained by Lightning's Trainer on the CPU.

Needs `pip install pytorch-lightning`. Trace the network in the fourth step, without touching this
file:

    modulelens trace --warmup 3 --grads --repo lens -- examples/lightning.py

The model that the Trainer calls outermost is the network, not the LightningModule, whose
`training_step` is no forward. Then:

    modulelens ls --repo lens
    modulelens check Classifier/body.0 --repo lens

In a notebook or a script of your own, a trace goes around `fit`:

    with ml.trace(task.network, name="classifier", warmup=3) as trace:
        trainer.fit(task, loader)
"""

from __future__ import annotations

import pytorch_lightning as lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 16, 4


class Classifier(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Classifier()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(64, FEATURES)
    data = TensorDataset(x, x[:, :CLASSES].argmax(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )
    task = Task()
    trainer.fit(task, DataLoader(data, batch_size=8))
    print(f"trained for {trainer.global_step} optimizer steps")


if __name__ == "__main__":
    main()
