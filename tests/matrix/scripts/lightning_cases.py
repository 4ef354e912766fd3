"""A LightningModule in many ways, by the name of a strategy; ``plain`` is Lightning's own loop in
one process, which has the rows of all ranks.

A report has, for each case, the losses of this rank, the norms of the gradient and what else the
case shows; weights are in ``FOLDER/<case>.pt``. The last batch of an epoch is short, and so is its
window, unless ``--samples`` says otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from script import given
from torch import nn

CASES = "fit manual own_hooks evaluated_first saved pretrained"
arguments = given(
    accelerator="cpu",
    devices=1,
    nodes=1,
    strategy="plain",
    samples=52,
    model="",
    cases=CASES.split(),
)
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
RANK = int(os.environ.get("NODE_RANK", 0)) * arguments.devices + LOCAL_RANK
RANKS = arguments.nodes * arguments.devices
ROWS, WIDTH = 8, 8  # rows of a step over all ranks
# Lightning makes a plain model on its GPU, whose generator draws other values than the CPU's.
ON_CPU = torch.device("cpu") if arguments.accelerator == "gpu" else contextlib.nullcontext()
WINDOWS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


class Net(pl.LightningModule):
    """Tied, frozen and bare parameters, a buffer, a module of the root, made in configure_model."""

    def __init__(self, width=WIDTH, rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.losses, self.norms, self.evaluated, self.noted = [], [], [], None

    def configure_model(self):
        if not hasattr(self, "body"):
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
        at = None if engine is None else (id(engine), engine.global_steps)
        if engine is not None and at != self.noted and engine.was_step_applied():
            self.noted = at
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
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)]


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

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.manual_backward(loss / 2)
        if index % 2:
            self.note_norm()
            if self.clip:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.hparams.rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)]


class Pretrained(pl.LightningModule):
    """A model of transformers that is read in configure_model."""

    def __init__(self, path):
        super().__init__()
        self.save_hyperparameters()
        self.losses, self.norms, self.evaluated = [], [], []

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
            self.clip_gradients(optimizer, 0.1, "norm")

    def optimizer_step(self, epoch, index, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = self.hparams.rate * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.hparams.rate)


def engine_of(module):
    model = module.trainer.strategy.model
    return model if hasattr(model, "get_global_grad_norm") else None


def loader():
    """Rank ``r`` of ``n`` has each n-th row; Lightning's own sampler would shuffle them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(arguments.samples, WIDTH, generator=generator)
    return batches_of(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)))


def batches_of(data):
    sampler = torch.utils.data.DistributedSampler(data, RANKS, RANK, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=ROWS // RANKS, sampler=sampler)


def trainer_of(**more):
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    chosen = {
        "accelerator": arguments.accelerator,
        "devices": arguments.devices,
        "num_nodes": arguments.nodes,
        "strategy": "auto" if arguments.strategy == "plain" else arguments.strategy,
        "max_epochs": 2,
        **dict.fromkeys(quiet, False),
    }
    return pl.Trainer(**{**chosen, **more})


def weights_of(module):
    """Whole fp32 weights on every rank, from the master weights where there are any."""
    import hf_zero

    weights = {}
    for name, parameter in module.named_parameters():
        held = hasattr(parameter, "_hf_zero_flat")
        whole = hf_zero.safe_get_full_fp32_param(parameter) if held else None
        with hf_zero.GatheredParameters([parameter]):
            weights[name] = (parameter if whole is None else whole).detach().float().cpu().clone()
    return weights


def shown(module, case):
    weights = weights_of(module)
    if RANK == 0:
        torch.save(weights, arguments.out / f"{case}.pt")
    return {"losses": module.losses, "norms": module.norms, "evaluated": module.evaluated}


def fit():
    """A short last window, clipping, a schedule, validation in between, test and prediction."""
    module = Net()
    trainer = trainer_of(**WINDOWS)
    trainer.fit(module, loader(), loader())
    found = shown(module, "fit")
    found["tested"] = trainer.test(module, loader(), verbose=False)[0]["val_loss"]
    predicted = torch.cat(trainer.predict(module, loader()))
    return {**found, "predicted": predicted.flatten().tolist()}


def trained(case, module, **settings):
    trainer_of(**settings).fit(module, loader())
    return shown(module, case)


def manual():
    return trained("manual", Manual())


def manual_unclipped():
    return trained("manual_unclipped", Manual(clip=0.0, rate=0.005))


def own_hooks():
    return trained("own_hooks", OwnHooks(), accumulate_grad_batches=2)


def pretrained():
    module = Pretrained(arguments.model)
    data = torch.randint(5, 64, (16, 12), generator=torch.Generator().manual_seed(2))
    trainer_of(max_epochs=3).fit(module, batches_of(data))
    return {**shown(module, "pretrained"), "kinds": module.kinds}


def evaluated_first():
    """Validate, fit, validate, fit again with a new optimizer: one module."""
    module = Net()
    found = [trainer_of().validate(module, loader(), verbose=False)[0]["val_loss"]]
    for _ in range(2):
        trainer_of(max_epochs=1).fit(module, loader())
        found.append(trainer_of().validate(module, loader(), verbose=False)[0]["val_loss"])
    return {**shown(module, "evaluated_first"), "found": found}


def saved():
    """An epoch and a checkpoint by callback; a second epoch by a new module and Trainer."""
    folder = arguments.out / "checkpoints"
    checkpoint = ModelCheckpoint(
        folder, save_last=True, monitor="val_loss", filename="epoch-{epoch}"
    )
    settings = {"callbacks": [checkpoint], "enable_checkpointing": True, **WINDOWS}
    trainer = trainer_of(max_epochs=1, **settings)
    trainer.fit(Net(), loader(), loader())
    trainer.save_checkpoint(folder / "first.ckpt")
    module, trainer = Net(), trainer_of(**settings)
    trainer.fit(module, loader(), loader(), ckpt_path=folder / "last.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    found = shown(module, "saved")
    for key, file in (("tested", "last.ckpt"), ("tested_whole", "weights.ckpt")):
        tested = trainer.test(Net(), loader(), ckpt_path=folder / file, verbose=False)
        found[key] = tested[0]["val_loss"]
    best = Path(checkpoint.best_model_path).name
    return {**found, "global_step": trainer.global_step, "best": best}


def main():
    found = {case: globals()[case]() for case in arguments.cases}
    (arguments.out / f"report-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
