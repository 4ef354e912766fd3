"""Runs that end early and go on: a loop for Accelerate and a Trainer, of seven steps of eight rows
on any number of ranks. Each rank reports the rows of its micro-batches, the losses of the steps and
what was said.

``--resume``: goes on from the newest save, in memory where there is a folder for it, or from the
save after the first ``--at`` steps. ``--fails N``: the first attempt also trains without an
interruption, for comparison; then rank 1 is killed in step N, and the memory of its host is lost.
"""

import logging
import os
import shutil
import signal
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from script import RANK, WORLD, given, report
from torch.utils.data import DataLoader

import hf_zero
from hf_zero.checkpoint.memory import checkpoints_of
from tests.helpers.models import ARCHITECTURES, VOCAB

# an epoch has four steps: the first save is in the first one, the end in the second
ROWS, A_STEP, STEPS, EVERY = 32, 8, 7, 3
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
said = []


def data():
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (ROWS, 9), generator=generator)
    ids[:, 0] = torch.arange(ROWS)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def build(args):
    model = ARCHITECTURES["gpt2"].build()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = args.dropout
    torch.manual_seed(100 + RANK)
    return model


def zero_config(args, folder):
    memory = {"every": EVERY, "folder": args.memory, "job": "job"}
    checkpoint = {"checkpoint": {"memory": memory}} if args.memory and folder is not None else {}
    return {"zero_optimization": {"stage": args.stage}, **checkpoint}


def begin(args, engine, step):
    """Kill rank 1, with the memory of its host, where it is to fail at ``step``."""
    if step == args.fails and ATTEMPT == 0:
        if (checkpoints := checkpoints_of(engine)) is not None:
            checkpoints.wait()
        torch.distributed.barrier()
        if RANK == 1:
            if checkpoints_of(engine) is not None:
                shutil.rmtree(engine.generations.folder(engine.generations.base).parent)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()


def micro_of(args):
    return args.micro or A_STEP // WORLD // args.accumulate


def saves_on_disk(args):
    """Else into memory, or not at all."""
    return not (args.memory or args.at)


def trainer(args, folder, resume):
    class Seeing(transformers.Trainer):
        rows = []

        def training_step(self, model, inputs, *rest, **more):
            self.rows.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *rest, **more)

    class Between(transformers.TrainerCallback):
        def on_train_begin(self, arguments, state, control, **others):
            self.first = state.global_step

        def on_step_begin(self, arguments, state, control, **others):
            if folder is not None:
                begin(args, run.deepspeed, state.global_step)

    saves, between = folder is not None and saves_on_disk(args), Between()
    run = Seeing(
        model=build(args),
        args=hf_zero.TrainingArguments(
            str(folder or args.out / "whole"), zero_config=zero_config(args, folder), use_cpu=True,
            max_steps=STEPS, per_device_train_batch_size=micro_of(args),
            gradient_accumulation_steps=args.accumulate, learning_rate=3e-3, adam_epsilon=1e-6,
            warmup_steps=2, logging_steps=1, save_strategy="steps" if saves else "no",
            save_steps=EVERY, report_to="none", disable_tqdm=True,
        ),
        train_dataset=data(),
        callbacks=[between],
    )  # fmt: skip
    run.train(resume_from_checkpoint=f"{folder}/checkpoint-{args.at}" if args.at else resume)
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    first = between.first if resume else 0
    found = {"first": first, "rows": run.rows, "losses": losses[first:] if resume else losses}
    return {**found, "accumulation": run.args.gradient_accumulation_steps}


def accelerated(args, folder, resume):
    config = zero_config(args, folder)
    config["train_micro_batch_size_per_gpu"] = config["gradient_accumulation_steps"] = "auto"
    launched = "ACCELERATE_USE_DEEPSPEED" in os.environ
    project = None
    if folder is not None:
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=None if launched else DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=args.accumulate,
        step_scheduler_with_optimizer=False,
        # an order that epoch and seed tell, not the generator's state
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
        project_config=project,
    )
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS)
    loader = DataLoader(data(), micro_of(args), shuffle=True, generator=torch.Generator())
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume:
        accelerator.load_state(f"{folder}/checkpoints/checkpoint_0" if args.at else None)
        accelerator.project_configuration.iteration = model.global_steps // EVERY
    found = {"first": model.global_steps, "rows": [], "losses": []}
    per_epoch = len(loader) // args.accumulate
    while model.global_steps < STEPS:
        epoch, done = divmod(model.global_steps, per_epoch)
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, done * args.accumulate) if done else loader
        window = []
        for batch in rest:
            if folder is not None and not window:
                begin(args, model, model.global_steps)
            with accelerator.accumulate(model):
                found["rows"].append(batch["input_ids"][:, 0].tolist())
                loss = model(**batch).loss
                window.append(float(accelerator.reduce(loss.detach(), "mean")))
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            found["losses"].append(sum(window) / len(window))
            window = []
            if folder is not None and model.global_steps % EVERY == 0 and saves_on_disk(args):
                accelerator.save_state()
            if model.global_steps == STEPS:
                break
    if folder is None:
        # the launcher's configuration has the memory for this run, too: the next engine takes the
        # folder that an attempt without this run looks in
        model.destroy()
    return found


def main():
    numbers = {"stage": 2, "accumulate": 1, "micro": 0, "fails": -1, "at": 0}
    texts = {"routes": ["trainer"], "runs": "", "memory": ""}
    args = given("resume", dropout=0.0, **texts, **numbers)
    runs = Path(args.runs or args.out / "runs")
    if args.memory:
        os.environ["HF_ZERO_HOST"] = "abcd"[RANK]  # each rank is a host
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_zero").addHandler(handler)
    seen = {"attempt": ATTEMPT}
    for name in args.routes:
        route, whole = globals()[name], args.out / f"whole-{name}-{RANK}.json"
        if args.fails >= 0 and ATTEMPT == 0:
            whole.write_text(str(route(args, None, False)["losses"]))
        said.clear()
        AcceleratorState._reset_state()
        GradientState._reset_state()
        resume = args.resume or ATTEMPT > 0
        seen[name] = {**route(args, runs / name, resume), "said": list(said)}
        AcceleratorState._reset_state()
        GradientState._reset_state()
    report(args.out, seen)


if __name__ == "__main__":
    main()
