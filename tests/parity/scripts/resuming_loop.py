"""A loop as `hf_zero.initialize` documents it, which goes on where a checkpoint has ended."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hf_zero

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
}


def main() -> None:
    rows = torch.randn(320, 12, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)])
    engine, _, loader, _ = hf_zero.initialize(
        model=model, config=CONFIG, training_data=TensorDataset(rows)
    )
    while engine.global_steps < 12:
        for (batch,) in loader:
            engine.backward(engine(batch).square().mean())
            engine.step()


main()
