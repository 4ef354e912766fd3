"""TRL's RewardTrainer: the head that the checkpoint lacks is made, trained and saved; with
adapters too.
"""

from __future__ import annotations

from datasets import Dataset
from peft import LoraConfig
from trl import RewardConfig, RewardTrainer
from trl_run import Report, Run, trained


def pairs(run: Run) -> Dataset:
    return run.rows().select_columns(["chosen", "rejected"])


def plain(run: Run, case: str) -> Report:
    args = RewardConfig(
        **run.options(
            case,
            max_length=64,
            center_rewards_coefficient=0.01,
            eval_strategy="steps",
            eval_steps=2,
        )
    )
    trainer = RewardTrainer(
        run.model("untied"),
        args,
        train_dataset=pairs(run),
        eval_dataset=pairs(run).select(range(8)),
    )
    return trained(trainer, run, case)


def adapters(run: Run, case: str) -> Report:
    args = RewardConfig(**run.options(case, max_length=64, learning_rate=1e-2))
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        task_type="SEQ_CLS",
        modules_to_save=["score"],
    )
    return trained(
        RewardTrainer(run.model("untied"), args, train_dataset=pairs(run), peft_config=lora),
        run,
        case,
    )


CASES = {"plain": plain, "adapters": adapters}
