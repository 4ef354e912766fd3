"""The common part of the TRL scripts: the command line, options, and the report."""

from __future__ import annotations

import os

from datasets import load_dataset
from script import RANK, WORLD, given, report

STEPS = 3
ROWS = 4  # of a global batch

LOGGED = ("loss", "grad_norm", "eval_loss", "reward", "eval_reward", "kl", "entropy")
LOGGED += ("completions/mean_length", "rewards/margins", "mean_token_accuracy")


class Run:
    """One start of a script: where it reads and writes, and how many ranks share a batch."""

    def __init__(self):
        asked = given(material="", cases="")
        self.out, self.material, self.cases = asked.out, asked.material, asked.cases.split(",")
        self.rank, self.world = RANK, WORLD

    def model(self, name):
        return f"{self.material}/{name}"

    def rows(self):
        """The ranks of this start share the cache, other starts do not."""
        file, cache = f"{self.material}/rows.jsonl", str(self.out / "cache")
        return load_dataset("json", data_files=file, split="train", cache_dir=cache)

    def options(self, case, **changes):
        """Arguments of any of TRL's config classes; what is not named here TRL chooses."""
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
        """Run the cases named on the command line, and write what they report."""
        found = {}
        for name in self.cases:
            print(f"== {name}", flush=True)
            found[name] = cases[name](self, name)
        report(self.out, found)


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
    loaded = [each for each in trainer.model.parameters() if hasattr(each, "ds_tensor")]
    before = {
        "loaded": sum(parameter.numel() for parameter in loaded),
        "loaded_here": sum(parameter.ds_tensor.numel() for parameter in loaded),
    }
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    engine = trainer.model_wrapped
    stage = engine.zero_optimization_stage() if trainer.is_deepspeed_enabled else None
    return {**logged(trainer), **before, "stage": stage, "saved": str(run.out / case)}
