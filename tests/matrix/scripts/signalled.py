"""Runs that get a signal: the Trainer with stock arguments and with hf-zero's, Lightning, a loop of
Accelerate and a plain one, each with its engine of its own, one after the other in this process.

``--to RANK``: the rank that gets ``--kind``, -1 for all. It comes in the forward of step AT, or
with ``--late SECONDS`` at a random moment after it. Each run is resumed once, for a step.
"""

import os
import random
import shutil
import signal
import threading
from pathlib import Path

import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from script import RANK, WORLD, given, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hf_zero

AT, LIMIT, WIDTH = 3, 1000, 8
CODE = 85
ZERO = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}


class Net(nn.Module):
    """A regression; ``told`` runs in the forward of step AT."""

    def __init__(self, told):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.told, self.calls = told, 0

    def forward(self, x=None, labels=None):
        self.calls += 1
        if self.calls == AT:
            self.told()
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def data():
    x = torch.randn(2 * LIMIT * WORLD, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def dicts():
    return [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]


def silent():
    """The signal of a resumed run, which gets none."""


def trainer(kind, folder, told, resume):
    more = {
        "max_steps": (resume or LIMIT - 1) + 1, "per_device_train_batch_size": 2, "use_cpu": True,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    if kind == "stock":
        arguments = transformers.TrainingArguments(str(folder), deepspeed=ZERO, **more)
    else:
        arguments = hf_zero.TrainingArguments(str(folder), zero_config=ZERO, **more)
    run = transformers.Trainer(Net(told), arguments, train_dataset=dicts())
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
            return self.net(*batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    run = pl.Trainer(
        strategy="zero_stage_3", accelerator="cpu", devices=WORLD, logger=False, max_epochs=1,
        max_steps=(resume or LIMIT - 1) + 1, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(*data()), batch_size=2, shuffle=True)
    code = None
    try:
        run.fit(Module(), loader, ckpt_path="last" if resume else None)
    except SystemExit as ended:
        code = ended.code
    return code, run.global_step, run.strategy.engine


def accelerated(folder, told, resume):
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO))
    model = Net(told)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dicts(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(folder / "state"))
    model.stop_on(signal.SIGTERM, signal.SIGUSR1)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if model.stop_requested:
            accelerator.save_state(str(folder / "state"))
            return CODE, model.global_steps, model
        if resume and model.global_steps > resume:
            break
    return None, model.global_steps, model


def loop(folder, told, resume):
    config = {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, _, loader, _ = hf_zero.initialize(
        model=Net(told), config=config, training_data=dicts(), resume=folder
    )
    engine.stop_on(signal.SIGTERM, signal.SIGUSR1)
    for batch in loader:
        engine.backward(engine(**batch)["loss"])
        engine.step()
        if engine.stop_requested:
            engine.save_checkpoint(folder)
            return CODE, engine.global_steps, engine
        if resume and engine.global_steps > resume:
            break
    return None, engine.global_steps, engine


def main():
    args = given(
        routes=["stock", "ours", "lightning", "accelerated", "loop"],
        kind="SIGTERM", to=-1, late=0.0, times=1,
    )  # fmt: skip
    number, chance = getattr(signal, args.kind), random.Random(f"{RANK} {args.kind}")
    seen, timers = [], []

    def told():
        if args.to not in (-1, RANK):
            return
        if args.late:
            timer = threading.Timer(chance.uniform(0, args.late), os.kill, (os.getpid(), number))
            timers.append(timer)
            timer.start()
        else:
            os.kill(os.getpid(), number)

    for name in args.routes:
        for time in range(args.times):
            folder, before = Path(args.out, f"{name}-{time}"), signal.getsignal(number)
            code, step, engine = globals()[name](folder, told, 0)
            for timer in timers:  # the signal may come after the stop, and ends nothing then
                timer.join()
            engine.destroy()
            restored = signal.getsignal(number) == before
            forget()
            again, after, engine = globals()[name](folder, silent, step)
            engine.destroy()
            forget()
            seen.append({"route": name, "code": code, "step": step, "restored": restored,
                         "again": again, "after": after})  # fmt: skip
            if args.times > 1 and RANK == 0:
                print(seen[-1], flush=True)
                shutil.rmtree(folder)
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
    report(args.out, {"runs": seen})


def forget():
    AcceleratorState._reset_state()
    GradientState._reset_state()


if __name__ == "__main__":
    main()
