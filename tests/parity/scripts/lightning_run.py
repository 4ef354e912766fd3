"""A fit of Lightning: accumulation, clipping, a schedule, dropout, checkpoints."""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_zero.integrations.lightning import ZeroStrategy

STAGE, FOLDER = int(sys.argv[1]), sys.argv[2]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        self.layers = nn.Sequential(*blocks, nn.Linear(12, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        rows, target = batch
        return (self.layers(rows).float() - target).square().mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    seed_everything(0)
    rows = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    trainer = Trainer(
        strategy=ZeroStrategy(stage=STAGE),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=FOLDER,
        callbacks=[ModelCheckpoint(FOLDER)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))


main()
