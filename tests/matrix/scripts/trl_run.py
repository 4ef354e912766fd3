"""The common part of the TRL scripts: their command line, the options of every trainer, and the
report of a run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset

torch.set_num_threads(1)
STEPS = 3
ROWS = 4  # of a global batch

Report = dict[str, Any]
LOGGED = (
    "loss",
    "grad_norm",
    "eval_loss",
    "reward",
    "eval_reward",
    "kl",
    "entropy",
    "completions/mean_length",
    "rewards/margins",
    "mean_token_accuracy",
)


class Run:
    """One start of a script: where it reads and writes, and how many ranks share a batch."""

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--material", type=Path, required=True)
        parser.add_argument("--cases", required=True)
        given = parser.parse_args()
        self.out: Path = given.out
        self.material: Path = given.material
        self.cases: list[str] = given.cases.split(",")
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))

    def model(self, name):
        return str(self.material / name)

    def rows(self):
        """Prompts, and what may and what may not follow them; the ranks of this start share the
        cache, other starts do not.
        """
        return load_dataset(
            "json",
            data_files=str(self.material / "rows.jsonl"),
            split="train",
            cache_dir=str(self.out / "cache"),
        )

    def options(self, case, **changes):
        """Arguments of any of TRL's config classes.

        Everything that TRL chooses by itself and that is not named here stays.
        """
        chosen = {
            "output_dir": str(self.out / case),
            "per_device_train_batch_size": ROWS // self.world,
            # the mean over batches is then the mean over rows for any number of ranks
            "per_device_eval_batch_size": 1,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            # Adam turns the rounding of small gradients (a key bias has hardly any) into weights
            "adam_epsilon": 1e-4,
            "bf16": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 5,
        }
        if "ACCELERATE_USE_DEEPSPEED" not in os.environ:
            chosen["use_cpu"] = True
        return {**chosen, **changes}

    def main(self, cases):
        """Run the cases named on the command line, one after another in this process, and write
        what they report.
        """
        report: Report = {"world": self.world}
        for name in self.cases:
            print(f"== {name}", flush=True)
            report[name] = cases[name](self, name)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"report-{self.rank}.json").write_text(json.dumps(report))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def logged(trainer):
    """Every number of the log that does not tell the time, in the order of the steps."""
    history = trainer.state.log_history
    return {
        key: [entry[key] for entry in history if key in entry]
        for key in LOGGED
        if any(key in entry for entry in history)
    }


def trained(trainer, run, case, resume=None):
    """Train, save the model as its user would, and say what was seen."""
    loaded = [
        parameter for parameter in trainer.model.parameters() if hasattr(parameter, "ds_tensor")
    ]
    before = {
        "loaded": sum(parameter.numel() for parameter in loaded),
        "loaded_here": sum(parameter.ds_tensor.numel() for parameter in loaded),
    }
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    engine = trainer.model_wrapped
    stage = engine.zero_optimization_stage() if trainer.is_deepspeed_enabled else None
    return {**logged(trainer), **before, "stage": stage, "saved": str(run.out / case)}
