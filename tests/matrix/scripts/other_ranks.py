"""Runs that save and go on, on any number of ranks with the same rows a step; each rank reports the
rows it saw, the losses and what was said.

``--save`` trains to the end and saves in between; without it the run goes on from what is in
``--runs``: from the first save, with ``--last`` from the last one that is whole. ``--die N``: the
last rank is killed when it has written half of its file of the Nth save.
"""

import argparse
import json
import logging
import os
import signal
from pathlib import Path

import torch
import transformers

import hf_zero
from tests.helpers.models import ARCHITECTURES, VOCAB

# an epoch has four steps: the save is in the first one, the end in the second
ROWS, A_STEP, STEPS, AT = 32, 8, 7, 3
said = []


def data():
    generator = torch.Generator().manual_seed(7)
    made = []
    for row in range(ROWS):
        ids = torch.randint(3, VOCAB, (9,), generator=generator)
        ids[0] = row
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def trainer(args, ranks, folder):
    class Seeing(transformers.Trainer):
        rows = []

        def training_step(self, model, inputs, *rest, **more):
            self.rows.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *rest, **more)

    run = Seeing(
        model=ARCHITECTURES["gpt2"].build(),
        args=hf_zero.TrainingArguments(
            folder,
            zero_config={
                "zero_optimization": {"stage": args.stage},
                "checkpoint": {"async_save": args.beside},
            },
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=args.micro or A_STEP // ranks // args.accumulate,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=3e-3,
            adam_epsilon=1e-6,
            warmup_steps=2,
            logging_steps=1,
            save_strategy="steps" if args.save else "no",
            save_steps=AT,
            save_total_limit=None,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data(),
    )
    run.train(
        resume_from_checkpoint=None if args.save else args.last or f"{folder}/checkpoint-{AT}"
    )
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return {"rows": run.rows, "losses": losses if args.save else losses[AT:]}


def loop(args, ranks, folder):
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, skip_first_batches

    config = {
        "zero_optimization": {"stage": args.stage},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=args.accumulate,
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True
        ),  # an order that epoch and seed tell, not the generator's state
    )
    model = ARCHITECTURES["gpt2"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS)
    shuffled = torch.utils.data.DataLoader(
        data(), batch_size=A_STEP // ranks // args.accumulate, shuffle=True
    )
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, shuffled, schedule)
    per_epoch, step = len(batches) // args.accumulate, 0
    if not args.save:
        accelerator.load_state(folder)
        step = AT
    found = {"rows": [], "losses": []}
    while step < STEPS:
        batches.set_epoch(step // per_epoch)
        skipped = step % per_epoch * args.accumulate
        window = []
        for batch in skip_first_batches(batches, skipped) if skipped else batches:
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
            step += 1
            found["losses"].append(sum(window) / len(window))
            window = []
            if args.save and step == AT:
                accelerator.save_state(folder)
            if step == STEPS:
                break
    return found


def die_in_a_save(number):
    from hf_zero.checkpoint import save_job, save_sharded

    saves = iter(range(1, number + 1))

    def dying(write):
        def written(path, *rest):
            result = write(path, *rest)
            if next(saves) == number:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return written

    save_job.write_image, save_sharded.write_tensors = (
        dying(save_job.write_image),
        dying(save_sharded.write_tensors),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--runs", required=True)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--die", type=int)
    parser.add_argument("--last", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--micro", type=int)
    parser.add_argument("--ways", nargs="+", default=["trainer", "loop"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_zero").addHandler(handler)
    if args.die and rank == ranks - 1:
        die_in_a_save(args.die)
    report = {}
    for way in args.ways:
        said.clear()
        Path(args.runs, way).mkdir(parents=True, exist_ok=True)
        report[way] = {**globals()[way](args, ranks, f"{args.runs}/{way}"), "said": list(said)}
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state()
        GradientState._reset_state()
    Path(args.out, f"report-{rank}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
