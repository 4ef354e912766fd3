"""A stock Trainer or a loop for Accelerate, in processes of srun or mpirun."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from hosts_train import GLOBAL_BATCH, STEPS, batch, build, place, weights
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

import hf_zero

ZERO = {"zero_optimization": {"stage": 3}}
CONFIG: dict[str, Any] = {
    **ZERO,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,  # DeepSpeed clips where nothing is written
    "timeout": 60.0,
}
ROWS = [{"x": x, "labels": y} for step in range(STEPS) for x, y in zip(*batch(step))]


class WithLoss(nn.Module):
    """The model as the Trainer wants it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.model(x), labels)}


class Trainer(transformers.Trainer):
    """Takes the rows in order and keeps its losses."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(ROWS)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs)["loss"]
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


def found(losses, model, rank, world):
    with hf_zero.GatheredParameters(list(model.parameters())):
        return {"losses": losses, "weights": weights(model), "rank": rank, "world": world}


def accelerate(out):
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(CONFIG)))
    model, optimizer = build()
    loader = DataLoader(ROWS, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    engine, prepared, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for rows in loader:
        loss = nn.functional.mse_loss(engine(rows["x"]), rows["labels"])
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.item())
    return found(losses, model, accelerator.process_index, accelerator.num_processes)


def stock(out):
    args = transformers.TrainingArguments(
        output_dir=str(out / "trainer"), per_device_train_batch_size=4, max_steps=STEPS,
        max_grad_norm=0.0, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        deepspeed=ZERO,
    )  # fmt: skip
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    both = {"train_dataset": ROWS, "optimizers": (optimizer, schedule)}
    run = Trainer(WithLoss(model), args, **both)
    run.train()
    return found(run.losses, model, run.args.process_index, run.args.world_size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--route", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    route = {"stock": stock, "accelerate": accelerate}[given.route]
    report = {"cases": {given.route: route(given.out)}, "place": place()}
    (given.out / f"report-{os.environ['RANK']}.json").write_text(json.dumps(report))
