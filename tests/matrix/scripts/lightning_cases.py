"""A LightningModule in many ways, by the name of a strategy; ``plain`` is Lightning's own loop in
one process.

    python lightning_cases.py --out FOLDER --package lightning.pytorch --devices 2 --strategies
    zero_stage_2,zero_stage_3 --cases fit,manual

A report has, for each strategy and case, the losses of this rank, the norms of the gradient and
what else the case shows; weights lie in ``FOLDER/<strategy>-<case>.pt``. One rank of plain
Lightning has the rows of two.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--package", default="lightning.pytorch")
parser.add_argument("--accelerator", default="cpu")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--strategies", default="plain")
parser.add_argument("--cases", required=True)
parser.add_argument(
    "--samples",
    type=int,
    default=52,
    help="52: the last batch of an epoch is short, and so is its window",
)
parser.add_argument("--model", type=Path, help="a folder that holds a pretrained BERT")
parser.add_argument("--resume", type=Path, help="a checkpoint of another run to resume from")
arguments = parser.parse_args()

pl = importlib.import_module(arguments.package)
deepspeed_strategy = importlib.import_module(f"{arguments.package}.strategies.deepspeed")
RANK = int(os.environ.get("LOCAL_RANK", 0))
ROWS, WIDTH = 8, 8  # rows of a step over all ranks
# Lightning makes a plain model on its GPU, whose generator draws other values than the CPU's.
ON_CPU = torch.device("cpu") if arguments.accelerator == "gpu" else contextlib.nullcontext()


class Net(pl.LightningModule):  # type: ignore[name-defined, misc]
    """Tied, frozen and bare parameters, a buffer, a module of the root, made in configure_model."""

    def __init__(self, width=WIDTH, rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluated: list[float] = []
        self.noted: tuple[int, int] | None = None

    def configure_model(self):
        if hasattr(self, "body"):
            return
        torch.manual_seed(0)
        with ON_CPU:
            self.make(self.hparams.width)

    def make(self, width):
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)
        )
        self.again = nn.Linear(width, width)
        self.again.weight = self.body[0][0].weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((1,), 0.25))

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return self.head(self.frozen(x) + self.again(x)) + self.shift.to(x.dtype)

    def loss(self, batch):
        x, y = batch
        return (self(x) * self.scale - y).float().pow(2).mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.note_norm()

    def note_norm(self):
        if engine_of(self) is None:
            grads = [p.grad for p in self.parameters() if p.requires_grad and p.grad is not None]
            self.norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))

    def on_train_batch_end(self, *ignored):
        engine = engine_of(self)
        if (
            engine is not None
            and (id(engine), engine.global_steps) != self.noted
            and engine.was_step_applied()
        ):
            self.noted = (id(engine), engine.global_steps)
            self.norms.append(engine.get_global_grad_norm())

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.evaluated.append(float(self.trainer.callback_metrics["val_loss"]))

    def cpu(self):
        assert engine_of(self) is None, "the end of a fit moves the memory of an engine"
        return super().cpu()

    def on_save_checkpoint(self, checkpoint):
        assert bool(checkpoint["state_dict"]) == (engine_of(self) is None), (
            "all weights are made whole for a checkpoint in shards"
        )

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams.rate, eps=1e-6)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
            },
        }


class Manual(Net):
    """Two micro-batches a step, the schedule stepped by hand, inside training_step."""

    def __init__(self, width=WIDTH, rate=0.05, clip=0.5):
        super().__init__(width, rate)
        self.clip = clip
        self.automatic_optimization = False

    def loss(self, batch):
        x, y = batch
        return (self(x) - y).float().pow(2).mean()

    def on_before_optimizer_step(self, optimizer):
        """The norm has been noted: here it is clipped already."""

    def training_step(self, batch, index):  # type: ignore[override]
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.manual_backward(loss / 2)
        if index % 2:
            self.note_norm()
            if self.clip:
                self.clip_gradients(
                    optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm"
                )
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=self.hparams.rate, momentum=0.9
        )
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)]


class Discarding(Manual):
    """Gradients that are thrown away before a step."""

    def training_step(self, batch, index):  # type: ignore[override]
        if index % 3 == 1:
            self.manual_backward(self.loss(batch))
            self.optimizers().zero_grad()
        super().training_step(batch, index)


class CarriedOver(Net):
    """DeepSpeedStrategy's behaviour with windows of two: they cross the end of an epoch, and the
    loss is divided twice.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.micro = 0

    def training_step(self, batch, index):  # type: ignore[override]
        optimizer, loss = self.optimizers(), self.loss(batch)
        self.losses.append(float(loss))
        self.manual_backward(loss / 4)
        self.micro += 1
        if self.micro % 2 == 0:
            self.note_norm()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        """The norm has been noted."""

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


class Pretrained(pl.LightningModule):  # type: ignore[name-defined, misc]
    """A model of transformers that is read in configure_model."""

    def __init__(self, path):
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluated: list[float] = []

    def configure_model(self):
        from transformers import BertForMaskedLM

        if not hasattr(self, "bert"):
            self.bert = BertForMaskedLM.from_pretrained(
                self.hparams.path, attn_implementation="eager"
            ).eval()
            self.kinds = sorted({type(p).__name__ for p in self.bert.parameters()})

    def training_step(self, batch, index):
        self.bert.eval()  # no dropout: ranks would draw other numbers than one process
        loss = self.bert(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6)


class OwnHooks(Net):
    """A module with the overrides of users: the backward, the clipping, the step."""

    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        if self.trainer.current_epoch == 0:  # the later epochs are not clipped at all
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch, index, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = self.hparams.rate * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self):
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=self.hparams.rate
        )


def engine_of(module):
    model = module.trainer.strategy.model
    return model if hasattr(model, "get_global_grad_norm") else None


def loader(samples=arguments.samples):
    """Rank ``r`` of ``n`` has each n-th row: together the rows of one rank. (Lightning's own
    sampler would shuffle them.)
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    sampler = torch.utils.data.DistributedSampler(data, arguments.devices, RANK, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=ROWS // arguments.devices, sampler=sampler)


def strategy_of(name):
    if not name.startswith("deepspeed") or arguments.accelerator != "cpu":
        return "auto" if name == "plain" else name
    # Lightning refuses DeepSpeedStrategy where there is no CUDA, and knows CPU devices by no index.
    deepspeed_strategy.CUDAAccelerator = pl.accelerators.CPUAccelerator
    deepspeed_strategy._validate_device_index_selection = lambda devices: None
    return name


def trainer_of(name, **more):
    settings = {
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(
        **{
            "accelerator": arguments.accelerator,
            "devices": arguments.devices,
            "strategy": strategy_of(name),
            **settings,
            **more,
        }
    )


def weights_of(module):
    """Whole fp32 weights on every rank, from the master weights where there are any."""
    import hf_zero

    weights = {}
    for name, parameter in module.named_parameters():
        whole = (
            hf_zero.safe_get_full_fp32_param(parameter)
            if hasattr(parameter, "_hf_zero_flat")
            else None
        )
        with hf_zero.GatheredParameters([parameter]):
            weights[name] = (parameter if whole is None else whole).detach().float().cpu().clone()
    return weights


def shown(module, name, case):
    weights = weights_of(module)
    if RANK == 0:
        torch.save(weights, arguments.out / f"{name}-{case}.pt")
    return {"losses": module.losses, "norms": module.norms, "evaluated": module.evaluated}


def fit(name):
    """Accumulation with a short last window, clipping, a schedule, validation in between, test
    and prediction after.
    """
    module = Net()
    trainer = trainer_of(name, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, loader(), loader())
    report = shown(module, name, "fit")
    report["tested"] = trainer.test(module, loader(), verbose=False)[0]["val_loss"]
    predicted = torch.cat(trainer.predict(module, loader()))
    return {**report, "predicted": predicted.flatten().tolist()}


def scheduled_accumulation(name):
    module = Net()
    callback = importlib.import_module(
        f"{arguments.package}.callbacks"
    ).GradientAccumulationScheduler({0: 1, 1: 3})
    trainer_of(name, callbacks=[callback]).fit(module, loader())
    return shown(module, name, "scheduled_accumulation")


def manual(name):
    module = Manual()
    trainer_of(name).fit(module, loader())
    return shown(module, name, "manual")


def manual_unclipped(name):
    module = Manual(clip=0.0, rate=0.005)
    trainer_of(name).fit(module, loader())
    return shown(module, name, "manual_unclipped")


def own_hooks(name):
    module = OwnHooks()
    trainer_of(name, accumulate_grad_batches=2).fit(module, loader())
    return shown(module, name, "own_hooks")


def discarding(name):
    module = Discarding()
    trainer_of(name).fit(module, loader())
    return shown(module, name, "discarding")


def carried_over(name):
    module = CarriedOver() if name == "plain" else Net()
    windows = {} if name == "plain" else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer_of(name, **windows).fit(module, loader(samples=52))
    return shown(module, name, "carried_over")


def pretrained(name):
    module = Pretrained(str(arguments.model))
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(5, 64, (16, 12), generator=generator)
    sampler = torch.utils.data.DistributedSampler(data, arguments.devices, RANK, shuffle=False)  # type: ignore[arg-type]
    batches = torch.utils.data.DataLoader(
        data, batch_size=ROWS // arguments.devices, sampler=sampler
    )  # type: ignore[arg-type]
    trainer_of(name, max_epochs=3).fit(module, batches)
    return {**shown(module, name, "pretrained"), "kinds": module.kinds}


def evaluated_first(name):
    """Validate, fit, validate, fit again with a new optimizer: one module."""
    module = Net()
    found = [trainer_of(name).validate(module, loader(), verbose=False)[0]["val_loss"]]
    for _ in range(2):
        trainer_of(name, max_epochs=1).fit(module, loader())
        found.append(trainer_of(name).validate(module, loader(), verbose=False)[0]["val_loss"])
    return {**shown(module, name, "evaluated_first"), "found": found}


def saved(name):
    """One epoch, a checkpoint by callback; a second epoch by a new module and Trainer that resume;
    the files on disk.
    """
    callbacks = importlib.import_module(f"{arguments.package}.callbacks")
    folder = arguments.out / f"{name}-checkpoints"
    checkpoint = callbacks.ModelCheckpoint(
        folder, save_last=True, monitor="val_loss", filename="epoch-{epoch}"
    )
    whole = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "enable_checkpointing": True}
    trainer = trainer_of(name, max_epochs=1, callbacks=[checkpoint], **whole)
    trainer.fit(Net(), loader(), loader())
    trainer.save_checkpoint(folder / "first.ckpt")
    module = Net()
    trainer = trainer_of(name, max_epochs=2, callbacks=[checkpoint], **whole)
    trainer.fit(module, loader(), loader(), ckpt_path=folder / "last.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    report = shown(module, name, "saved")
    fresh = Net()
    report["tested"] = trainer.test(fresh, loader(), ckpt_path=folder / "last.ckpt", verbose=False)[
        0
    ]["val_loss"]
    report["tested_whole"] = trainer.test(
        Net(), loader(), ckpt_path=folder / "weights.ckpt", verbose=False
    )[0]["val_loss"]
    return {
        **report,
        "global_step": trainer.global_step,
        "best": Path(checkpoint.best_model_path).name,
    }


def resumed(name):
    """The second epoch of a run that other ranks, perhaps at another stage, began."""
    module = Net()
    trainer_of(name, accumulate_grad_batches=2, gradient_clip_val=0.5).fit(
        module, loader(), loader(), ckpt_path=arguments.resume
    )
    return shown(module, name, "resumed")


def converted(name):
    """A sharded checkpoint as one file by Lightning's own function, and a module loaded from
    that file.
    """
    convert = importlib.import_module(
        f"{arguments.package}.utilities.deepspeed"
    ).convert_zero_checkpoint_to_fp32_state_dict
    convert(arguments.resume.with_name("last.ckpt"), arguments.out / "whole.ckpt")
    module = Net.load_from_checkpoint(arguments.out / "whole.ckpt")
    torch.save(
        {key: p.detach().cpu() for key, p in module.named_parameters()},
        arguments.out / f"{name}-converted.pt",
    )
    content = torch.load(arguments.out / "whole.ckpt", weights_only=True)
    return {
        "keys": sorted(content),
        "epoch": content["epoch"],
        "rate": module.hparams.rate,
        "shift": module.shift.item(),
    }


def precision(name, kind):
    module = Net()
    settings: dict[str, Any] = {}
    # from a scale that fits on: a step that overflows is left out
    if name.startswith("zero") and kind.startswith("16"):
        home = {"lightning.pytorch": "lightning"}.get(arguments.package, arguments.package)
        zero = {
            "zero_optimization": {"stage": int(name[-1])},
            "fp16": {"enabled": True, "initial_scale_power": 8},
        }
        settings["strategy"] = importlib.import_module(f"hf_zero.integrations.{home}").ZeroStrategy(
            config=zero
        )
    trainer = trainer_of(name, precision=kind, max_epochs=4, **settings)
    before = trainer.validate(module, loader(), verbose=False)[0]["val_loss"]
    trainer.fit(module, loader(), loader())
    dtypes = sorted({str(p.dtype) for p in module.parameters()})
    engine = engine_of(module)
    return {
        **shown(module, name, kind),
        "before": before,
        "dtypes": dtypes,
        "computes": str(trainer.predict(module, loader())[0].dtype),
        "precision": getattr(getattr(engine, "config", None), "precision", None),
        "skipped": getattr(engine, "skipped_steps", 0),
    }


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        fit,
        scheduled_accumulation,
        manual,
        manual_unclipped,
        discarding,
        carried_over,
        own_hooks,
        evaluated_first,
        saved,
        resumed,
        converted,
        pretrained,
    )
}
CASES |= {
    kind: lambda name, kind=kind: precision(name, kind)
    for kind in ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
}  # type: ignore[misc]


def main():
    report = {
        name: {case: CASES[case](name) for case in arguments.cases.split(",")}
        for name in arguments.strategies.split(",")
    }
    (arguments.out / f"report-{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
