"""A loop over Fabric: accumulation, clipping, a scheduler, dropout, an evaluation, a save."""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_zero.integrations.lightning import FabricStrategy

STAGE, FOLDER = int(sys.argv[1]), sys.argv[2]
PRECISION = "bf16-true" if "bf16" in sys.argv else "32-true"


def main() -> None:
    strategy = FabricStrategy(stage=STAGE)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=PRECISION)
    fabric.launch()
    seed_everything(0)
    rows = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
    for _ in range(2):
        for number, (batch, target) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = (model(batch).float() - target).square().mean()
                fabric.backward(loss / 2, model=model)
            if accumulates:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            fabric.all_reduce(model(rows).float().mean())
        model.train()
    fabric.save(f"{FOLDER}/fabric.ckpt", {"model": model, "optimizer": optimizer})


main()
