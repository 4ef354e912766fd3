"""TRL's SFTTrainer: packed, on completions only, on the assistant's turns only, with adapters,
and resumed.
"""

from __future__ import annotations

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
from trl_run import Report, Run, trained


def texts(run: Run) -> Dataset:
    return run.rows().select_columns("prompt").rename_column("prompt", "text")


def completions(run: Run) -> Dataset:
    return run.rows().select_columns(["prompt", "chosen"]).rename_column("chosen", "completion")


def turns(run: Run) -> Dataset:
    def talk(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
        return {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["chosen"]},
            ]
        }

    rows = run.rows()
    return rows.map(talk, remove_columns=rows.column_names)


def plain(run: Run, case: str) -> Report:
    args = SFTConfig(**run.options(case, max_length=48, eval_strategy="steps", eval_steps=2))
    trainer = SFTTrainer(
        run.model("tied"), args, train_dataset=texts(run), eval_dataset=texts(run).select(range(8))
    )
    return trained(trainer, run, case)


def packed(run: Run, case: str) -> Report:
    args = SFTConfig(**run.options(case, max_length=64, packing=True, packing_strategy="wrapped"))
    return trained(SFTTrainer(run.model("untied"), args, train_dataset=texts(run)), run, case)


def packed_bfd(run: Run, case: str) -> Report:
    args = SFTConfig(**run.options(case, max_length=64, packing=True))
    return trained(SFTTrainer(run.model("untied"), args, train_dataset=texts(run)), run, case)


def completion(run: Run, case: str) -> Report:
    args = SFTConfig(
        **run.options(
            case,
            max_length=96,
            completion_only_loss=True,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2 // run.world,
        )
    )
    return trained(SFTTrainer(run.model("untied"), args, train_dataset=completions(run)), run, case)


def assistant(run: Run, case: str) -> Report:
    args = SFTConfig(**run.options(case, max_length=96, assistant_only_loss=True))
    return trained(SFTTrainer(run.model("tied"), args, train_dataset=turns(run)), run, case)


def adapters(run: Run, case: str) -> Report:
    args = SFTConfig(**run.options(case, max_length=48, learning_rate=1e-2))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return trained(
        SFTTrainer(run.model("untied"), args, train_dataset=texts(run), peft_config=lora), run, case
    )


def smoothed(run: Run, case: str) -> Report:
    """A forward for the loss and one without gradients for the metrics, in one step."""
    args = SFTConfig(**run.options(case, max_length=48, label_smoothing_factor=0.1))
    return trained(SFTTrainer(run.model("untied"), args, train_dataset=texts(run)), run, case)


CASES = {
    "plain": plain,
    "packed": packed,
    "packed_bfd": packed_bfd,
    "completion": completion,
    "assistant": assistant,
    "adapters": adapters,
    "smoothed": smoothed,
}
