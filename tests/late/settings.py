"""A setting that one of two ranks changes: ``python -m tests.late.settings MODE``, with RANK and so
on set. One line of JSON a stage: the step that has raised, and what.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.late import device

import torch  # isort: skip
from torch import nn  # isort: skip
import hf_zero  # isort: skip

STAGES, STEPS, CHANGED_AT = (0, 3), 8, 3


def engine_of(stage: int) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    return hf_zero.initialize(model=model, config=config)[0]


def main(mode: str) -> None:
    rank = device.begin(mode)
    for stage in STAGES:
        engine, raised = engine_of(stage), ""
        for number in range(STEPS):
            if number == CHANGED_AT and rank:
                engine.optimizer.param_groups[0]["lr"] = 0.05
            inputs = torch.randn(2, 16).to(engine.device)
            engine.backward(engine(inputs).square().mean())
            try:
                engine.step()
            except hf_zero.errors.RankMismatchError as error:
                raised = str(error)
                break
        device.tell(stage=stage, step=number, raised=raised)
        engine.destroy()
    device.tell(reports=device.reports())


if __name__ == "__main__":
    main(sys.argv[1])
