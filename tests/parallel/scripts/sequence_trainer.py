"""A stock Trainer; under a launcher its two ranks read parts of the same sequences."""

import argparse
import json
import os
from pathlib import Path

import torch
import transformers
from accelerate import ParallelismConfig

from tests.helpers.models import VOCAB, seeded
from tests.helpers.sequences import TOKENS, llama
from tests.helpers.trainers import options, weights

ROWS, STEPS = 2, 4


def data(count):
    """Rows with as many labels each: the plain Trainer's mean is over a window, and under sequence
    parallelism over its micro-batches.
    """
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (count, TOKENS), generator=generator)
    return [
        {"input_ids": row, "labels": torch.where(torch.arange(TOKENS) < 5, -100, row)}
        for row in ids
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--accumulation", type=int, default=1)
    given = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    changes = {}
    if given.stage is not None:
        changes = {
            "deepspeed": {"zero_optimization": {"stage": given.stage}},
            "parallelism_config": ParallelismConfig(sp_size=2, sp_backend="deepspeed"),
        }
    args = transformers.TrainingArguments(
        **options(
            given.out,
            use_cpu=given.stage is None,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=given.accumulation,
            max_steps=STEPS,
            adam_epsilon=1e-4,
            eval_strategy="steps",
            eval_steps=STEPS,
            **changes,
        )
    )
    trainer = transformers.Trainer(
        seeded(llama),
        args,
        train_dataset=data(ROWS * given.accumulation * STEPS),
        eval_dataset=data(6),
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    found = weights(trainer)
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")
    report = {
        "log": [
            {key: value for key, value in entry.items() if key in kept}
            for entry in trainer.state.log_history
        ]
    }
    if given.stage is not None:
        report["stage"] = trainer.model_wrapped.zero_optimization_stage()
        report["batch"] = trainer.model_wrapped.train_batch_size()
        report["total"] = trainer.get_total_train_batch_size(args)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.save(found, given.out / f"weights-{rank}.pt")
    (given.out / f"report-{rank}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
