"""PEFT under the Trainer: trained with checkpoints, resumed from one, saved.

``--stage`` trains sharded, without it nothing is.
"""

import json
import os

import torch
import transformers
from peft_base import ROWS, account, adapted, arguments, rows

STEPS = 4


def trainer(args, folder, case):
    world = int(os.environ.get("WORLD_SIZE", 1))
    options = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=ROWS // world,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=2,
        learning_rate=1e-2,
        # smaller, and how the rows are added up decides some signs: plain training is then 1e-5 off
        # float64 itself
        adam_epsilon=1e-4,
        lr_scheduler_type="linear",
        average_tokens_across_devices=False,
        report_to=[],
        use_cpu=True,
        seed=7,
        deepspeed=None if args.stage is None else {"zero_optimization": {"stage": args.stage}},
    )
    # The arguments come first: with a ZeRO-3 configuration alive, the base is loaded in shards.
    return transformers.Trainer(adapted(args.base, case), options, train_dataset=rows(ROWS * STEPS))


def logged(run):
    return [
        [entry["loss"], entry["grad_norm"]]
        for entry in run.state.log_history
        if "grad_norm" in entry
    ]


def run(args, case):
    folder = args.out / case
    first = trainer(args, folder, case)
    first.train()
    first.save_model(str(folder / "last"))
    seen = {"first": logged(first), "account": account(first.model_wrapped)}
    del first
    again = trainer(args, folder, case)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    again.save_model(str(folder / "again"))
    return seen | {"again": logged(again)}


if __name__ == "__main__":
    args = arguments()
    report = {case: run(args, case) for case in args.cases.split(",")}
    (args.out / f"report-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
