"""TRL's DPOTrainer: with a reference model of its own, given, synchronised, computed beforehand,
or the model without its adapters.
"""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer
from trl_run import Report, Run, trained


def trainer(run: Run, args: DPOConfig, model: str = "untied", **changes: object) -> DPOTrainer:
    return DPOTrainer(run.model(model), args=args, train_dataset=run.rows(), **changes)


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def implied(run: Run, case: str) -> Report:
    """The reference is the model itself as it is on disk, loaded by TRL."""
    args = DPOConfig(**run.options(case, max_length=128, eval_strategy="steps", eval_steps=2))
    return trained(trainer(run, args, "tied", eval_dataset=run.rows().select(range(8))), run, case)


def explicit(run: Run, case: str) -> Report:
    args = DPOConfig(
        **run.options(
            case,
            max_length=128,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2 // run.world,
        )
    )
    reference = AutoModelForCausalLM.from_pretrained(run.model("reference"))
    return trained(trainer(run, args, ref_model=reference), run, case)


def synchronised(run: Run, case: str) -> Report:
    """The reference follows the model."""
    args = DPOConfig(
        **run.options(
            case,
            max_length=128,
            sync_ref_model=True,
            ref_model_sync_steps=1,
            ref_model_mixup_alpha=0.5,
        )
    )
    return trained(trainer(run, args), run, case)


def precomputed(run: Run, case: str) -> Report:
    args = DPOConfig(
        **run.options(
            case, max_length=128, precompute_ref_log_probs=True, eval_strategy="steps", eval_steps=2
        )
    )
    return trained(trainer(run, args, eval_dataset=run.rows().select(range(8))), run, case)


def adapters(run: Run, case: str) -> Report:
    args = DPOConfig(**run.options(case, max_length=128, learning_rate=1e-2))
    return trained(trainer(run, args, peft_config=lora()), run, case)


def adapters_precomputed(run: Run, case: str) -> Report:
    args = DPOConfig(
        **run.options(case, max_length=128, learning_rate=1e-2, precompute_ref_log_probs=True)
    )
    return trained(trainer(run, args, peft_config=lora()), run, case)


def adapters_given(run: Run, case: str) -> Report:
    """The model comes with adapters: TRL freezes a copy of them as the reference."""
    args = DPOConfig(**run.options(case, max_length=128, learning_rate=1e-2))
    set_seed(5)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(run.model("untied")), lora())
    return trained(DPOTrainer(model, args=args, train_dataset=run.rows()), run, case)


def resumed(run: Run, case: str) -> Report:
    """Interrupted after the second step, and resumed by another trainer."""
    options = run.options(case, max_length=128, save_strategy="steps", save_steps=2)
    trainer(run, DPOConfig(**options)).train()
    again = trainer(run, DPOConfig(**options))
    return trained(again, run, case, resume=f"{options['output_dir']}/checkpoint-2")


CASES = {
    "implied": implied,
    "explicit": explicit,
    "synchronised": synchronised,
    "precomputed": precomputed,
    "adapters": adapters,
    "adapters_precomputed": adapters_precomputed,
    "adapters_given": adapters_given,
    "resumed": resumed,
}
