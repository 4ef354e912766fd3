"""A loop over Accelerate that goes on from the step of its engine."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2),
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    )
    inputs = torch.randn(160, 12, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.1), nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch, target in accelerator.skip_first_batches(loader, 2 * model.global_steps):
        with accelerator.accumulate(model):
            accelerator.backward((model(batch) - target).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


main()
