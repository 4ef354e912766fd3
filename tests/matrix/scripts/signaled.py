"""Runs that get a signal: the Trainer with stock arguments and with hf-zero's, Lightning, a loop of
Accelerate and a plain one, each with its engine of its own, one after the other in this process.
Rank 1 gets SIGUSR1 in the forward of step AT; each run is resumed once, for MORE steps.
"""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from script import RANK, WORLD, given, report
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import hf_zero

AT, LIMIT, WIDTH, MORE = 3, 1000, 8, 2
CODE = 85
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
ZERO = {
    "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
}  # fmt: skip


class Net(nn.Module):
    """A regression; ``told`` runs in the forward of step AT."""

    def __init__(self, told):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.told, self.calls = told, 0

    def forward(self, x=None, labels=None):
        if self.training:
            self.calls += 1
            if self.calls == AT:
                self.told()
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


class Rows(Dataset):
    """Rows for 2 ranks, as dicts."""

    def __init__(self):
        x = torch.randn(4 * LIMIT, WIDTH, generator=torch.Generator().manual_seed(1))
        self.rows = x, x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, index):
        return dict(zip(("x", "labels"), (part[index] for part in self.rows), strict=True))


class Placed(DataLoader):
    """A loader whose place Lightning keeps: without a state, an epoch begins anew."""

    batches = 0

    def __iter__(self):
        for number, batch in enumerate(super().__iter__(), 1):
            if number > self.batches:
                self.batches = number
                yield batch

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def silent():
    """The signal of a resumed run, which gets none."""


def trainer(kind, folder, told, resume):
    """An evaluation is due after each step, also after that of the save."""
    more = {
        "max_steps": resume + MORE if resume else LIMIT, "per_device_train_batch_size": 2,
        "use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "logging_strategy": "no", "learning_rate": ADAMW["lr"], "lr_scheduler_type": "constant",
        "weight_decay": ADAMW["weight_decay"], "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    if kind == "stock":
        arguments = transformers.TrainingArguments(str(folder), deepspeed=ZERO, **more)
    else:
        arguments = hf_zero.TrainingArguments(str(folder), zero_config=ZERO, **more)
    run = transformers.Trainer(
        Net(told), arguments, train_dataset=Rows(), eval_dataset=Subset(Rows(), range(4))
    )
    try:
        run.train(resume_from_checkpoint=bool(resume))
        return None, run.state.global_step, run.deepspeed
    except SystemExit as ended:
        return ended.code, run.state.global_step, run.deepspeed


def stock(folder, told, resume):
    return trainer("stock", folder, told, resume)


def ours(folder, told, resume):
    return trainer("ours", folder, told, resume)


def lightning(folder, told, resume):
    class Module(pl.LightningModule):
        def configure_model(self):
            if not hasattr(self, "net"):
                self.net = Net(told)

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), **ADAMW)

    run = pl.Trainer(
        strategy="zero_stage_3", accelerator="cpu", devices=WORLD, logger=False, max_epochs=1,
        max_steps=resume + MORE if resume else LIMIT, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
    )  # fmt: skip
    rows = Rows()
    loader = Placed(rows, 2, sampler=DistributedSampler(rows, WORLD, RANK, shuffle=False))
    code = None
    try:
        run.fit(Module(), loader, ckpt_path="last" if resume else None)
    except SystemExit as ended:
        code = ended.code
    return code, run.global_step, run.strategy.engine


def accelerated(folder, told, resume):
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO))
    model = Net(told)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    loader = DataLoader(Rows(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, resume)
    model.stop_on(signal.SIGTERM, signal.SIGUSR1)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if model.stop_requested:
            accelerator.save_state(str(folder / "state"))
            return CODE, model.global_steps, model
        if resume and model.global_steps == resume + MORE:
            break
    return None, model.global_steps, model


def loop(folder, told, resume):
    config = {**ZERO, "optimizer": {"type": "AdamW", "params": ADAMW}}
    engine, _, loader, _ = hf_zero.initialize(
        model=Net(told), config=config, training_data=Rows(), resume=folder
    )
    engine.stop_on(signal.SIGTERM, signal.SIGUSR1)
    for batch in loader:
        engine.backward(engine(**batch)["loss"])
        engine.step()
        if engine.stop_requested:
            engine.save_checkpoint(folder)
            return CODE, engine.global_steps, engine
        if resume and engine.global_steps == resume + MORE:
            break
    return None, engine.global_steps, engine


def main():
    args, seen, number = given(), [], signal.SIGUSR1

    def told():
        if RANK == 1:
            os.kill(os.getpid(), number)

    for route in (stock, ours, lightning, accelerated, loop):
        folder, before = Path(args.out, route.__name__), signal.getsignal(number)
        code, step, engine = route(folder, told, 0)
        engine.destroy()
        restored = signal.getsignal(number) == before
        forget()
        again, after, engine = route(folder, silent, step)
        engine.destroy()
        forget()
        seen.append({"route": route.__name__, "code": code, "step": step, "restored": restored,
                     "again": again, "after": after})  # fmt: skip
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    report(args.out, {"runs": seen})


def forget():
    AcceleratorState._reset_state()
    GradientState._reset_state()


if __name__ == "__main__":
    main()
