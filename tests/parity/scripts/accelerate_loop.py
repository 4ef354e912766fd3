"""A loop over Accelerate: accumulation, clipping, a scheduler, dropout, gather, save_state."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STAGE, FOLDER = int(sys.argv[1]), sys.argv[2]
PRECISION = sys.argv[3] if len(sys.argv) > 3 else "no"


def main() -> None:
    plugin = DeepSpeedPlugin(zero_stage=STAGE, gradient_accumulation_steps=2)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=PRECISION
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 12, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(2):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = (model(batch.to(next(model.parameters()).dtype)) - target).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.gather(loss.detach())
        accelerator.save_state(f"{FOLDER}/epoch{epoch}")
    accelerator.load_state(f"{FOLDER}/epoch1")


main()
