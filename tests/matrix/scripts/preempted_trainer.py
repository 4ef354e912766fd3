"""A Trainer with ``enable_jit_checkpoint`` that may be told to end at any time.

``--stage`` trains sharded, without it nothing is.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import transformers

STEPS, ROWS, LENGTH = 12, 4, 8  # ROWS of all ranks together


class Notes(transformers.TrainerCallback):
    """Says when a step begins, and takes its time."""

    def __init__(self, out, rank):
        self.out, self.rank = out, rank

    def on_step_begin(self, args, state, control, **kwargs):
        with open(self.out / f"begun-{self.rank}", "a") as file:
            file.write(f"{state.global_step}\n")
        time.sleep(0.1)

    def on_substep_end(self, args, state, control, **kwargs):
        time.sleep(0.1)


def model():
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config)


def rows():
    torch.manual_seed(23)
    return [
        {"input_ids": torch.randint(1, 61, (LENGTH,)), "labels": int(torch.randint(2, ()))}
        for _ in range(2 * ROWS * STEPS)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options = transformers.TrainingArguments(
        str(args.out / "run"),
        per_device_train_batch_size=ROWS // world,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        learning_rate=1e-2,
        adam_epsilon=1e-6,
        report_to=[],
        use_cpu=True,
        enable_jit_checkpoint=True,
        average_tokens_across_devices=False,
        deepspeed=None if args.stage is None else {"zero_optimization": {"stage": args.stage}},
    )
    trainer = transformers.Trainer(
        model(), options, train_dataset=rows(), callbacks=[Notes(args.out, rank)]
    )
    (args.out / f"pid-{rank}").write_text(str(os.getpid()))
    last = (
        transformers.trainer_utils.get_last_checkpoint(options.output_dir)
        if (args.out / "run").exists()
        else None
    )
    trainer.train(resume_from_checkpoint=last)
    losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
    first = int(last.rpartition("-")[2]) if last else 0
    report = {
        "first": first,
        "losses": losses[first:],
        "stopped": trainer.state.global_step < STEPS,
        "saved": sorted(path.name for path in (args.out / "run").glob("checkpoint-*")),
        "incomplete": [str(path) for path in args.out.glob("run/*/checkpoint-is-incomplete.txt")],
    }
    (args.out / f"report-{rank}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
