"""Refusals of a Trainer under ZeroStrategy: each case's error, as ``Class: message``, in one
process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from hf_zero.integrations.lightning import ZeroStrategy

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
OUT: Path = parser.parse_args().out


class Net(pl.LightningModule):
    optimizers_made = 1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()

    validation_step = training_step

    def configure_optimizers(self):
        made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.optimizers_made)]
        return made[0] if len(made) == 1 else made


class Two(Net):
    optimizers_made = 2

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class WithSchedule(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Nothing(Net):
    def training_step(self, batch, index):  # type: ignore[override]
        return None if index == 0 else super().training_step(batch, index)


class NoOptimizer(Net):
    def configure_optimizers(self):
        return None


def loader():
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=2
    )


def trainer(strategy="zero_stage_3", **more):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
    }
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "strategy": strategy, **quiet, **more})


def fit(module=None, strategy="zero_stage_3", ckpt_path=None, **more):
    made = trainer(strategy, **more)
    made.fit(Net() if module is None else module, loader(), ckpt_path=ckpt_path)
    return made


def with_config(**config):
    return ZeroStrategy(config={"zero_optimization": {"stage": 2}, **config})


def resume_from_a_file():
    fit().save_checkpoint(OUT / "weights.ckpt", weights_only=True)
    fit(ckpt_path=OUT / "weights.ckpt")


def storage_options():
    fit().save_checkpoint(OUT / "folder.ckpt", storage_options={"a": 1})


def value_clipping_by_hand():
    class ByHand(Net):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")

    fit(ByHand())


def hyperparameters():
    class Wide(Net):
        def __init__(self, criterion):
            super().__init__()
            self.save_hyperparameters()

    fit(Wide(argparse.Namespace(a=1)), enable_checkpointing=True, default_root_dir=OUT)


def another_group():
    """A model under another strategy first made a group of one rank."""
    made = trainer()
    made.strategy.cluster_environment.set_world_size(2)
    made.strategy.parallel_devices = [torch.device("cpu")] * 2
    made.strategy.setup_distributed()


REFUSED: dict[str, Callable[[], Any]] = {
    "two optimizers": lambda: fit(Two()),
    "two schedulers": lambda: fit(
        WithSchedule(), with_config(scheduler={"type": "WarmupLR", "params": {}})
    ),
    "an argument of DDP": lambda: ZeroStrategy(find_unused_parameters=True),
    "two stages": lambda: ZeroStrategy({"zero_optimization": {"stage": 2}}, stage=3),
    "precision in two places": lambda: fit(strategy=with_config(bf16={"enabled": True})),
    "double precision": lambda: trainer(precision="64-true"),
    "a foreign plugin": lambda: trainer(plugins=[MixedPrecision("bf16-mixed", "cpu")]),
    "clipping by value": lambda: fit(gradient_clip_val=1.0, gradient_clip_algorithm="value"),
    "clipping by value by hand": value_clipping_by_hand,
    "clipping in two places": lambda: fit(
        strategy=with_config(gradient_clipping=2.0), gradient_clip_val=1.0
    ),
    "accumulation in two places": lambda: fit(strategy=with_config(gradient_accumulation_steps=4)),
    "batches that do not fit": lambda: fit(
        strategy=with_config(train_batch_size=6, train_micro_batch_size_per_gpu=4)
    ),
    "averaged weights": lambda: fit(callbacks=[StochasticWeightAveraging(swa_lrs=0.1)]),
    "averaged weights by their callback": lambda: fit(callbacks=[WeightAveraging()]),
    "compiled": lambda: fit(torch.compile(Net(), backend="eager")),
    "an optimizer of whole tensors": lambda: fit(
        type(
            "Lbfgs", (Net,), {"configure_optimizers": lambda s: torch.optim.LBFGS(s.parameters())}
        )()
    ),
    "resume from a file": resume_from_a_file,
    "resume from nothing": lambda: fit(ckpt_path=OUT),
    "storage options": storage_options,
    "hyper-parameters": hyperparameters,
    "another group": another_group,
}


def accepted():
    """The same in ways that are right, and what becomes of it."""
    auto = with_config(
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
    )
    filled = fit(
        strategy=auto, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=0.5
    ).strategy.engine.config
    named = fit(
        NoOptimizer(),
        with_config(
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
            scheduler={"type": "WarmupLR", "params": {}},
        ),
    )
    idle = fit(NoOptimizer())
    skipping = fit(Nothing())
    return {
        "filled": [filled.precision, filled.gradient_clipping, filled.train_batch_size],
        "named": [
            type(named.optimizers[0]).__name__,
            type(named.lr_scheduler_configs[0].scheduler).__name__,
            named.strategy.engine.global_steps,
        ],
        "idle": idle.strategy.engine.global_steps,
        "skipping": skipping.strategy.engine.global_steps,
    }


def message(attempt):
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


if __name__ == "__main__":
    report = {
        "refused": {name: message(attempt) for name, attempt in REFUSED.items()},
        "accepted": accepted(),
    }
    (OUT / "report-0.json").write_text(json.dumps(report))
