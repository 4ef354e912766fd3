"""TRL's GRPO on gathered and on sharded weights, with a reference, adapters, a reward model; and
RLOO.
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_drawing import GROUP, Letters, model, prompts
from trl_run import Report, Run, trained


def options(run: Run, case: str, **changes: Any) -> dict[str, Any]:
    return run.options(case, max_completion_length=24, num_generations=GROUP, **changes)


def rewarded(run: Run, case: str, trainer: GRPOTrainer | RLOOTrainer, reward: Letters) -> Report:
    return {**trained(trainer, run, case), "completions": reward.seen}


def gathered(run: Run, case: str) -> Report:
    """Weights whole while generating (TRL's default); each batch used twice; a reference model."""
    reward, args = (
        Letters(),
        GRPOConfig(**options(run, case, beta=0.1, num_iterations=2, max_steps=4)),
    )
    return rewarded(run, case, GRPOTrainer(model(run), reward, args, prompts(run)), reward)


def sharded(run: Run, case: str) -> Report:
    """Weights gathered unit by unit in every decoding step, by ranks whose rows end at different
    steps.
    """
    reward, args = Letters(), GRPOConfig(**options(run, case, ds3_gather_for_generation=False))
    return rewarded(run, case, GRPOTrainer(model(run), reward, args, prompts(run)), reward)


def evaluated(run: Run, case: str) -> Report:
    """Evaluation generates, too: before there is an engine, and in the middle of training."""
    args = GRPOConfig(
        **options(
            run,
            case,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=2,
            per_device_eval_batch_size=GROUP,
            loss_type="grpo",
        )
    )
    data = prompts(run)
    trainer = GRPOTrainer(model(run), Letters(), args, data, eval_dataset=data.select(range(4)))
    before = trainer.evaluate()
    return {**trained(trainer, run, case), "before": [before["eval_loss"], before["eval_reward"]]}


def windows(run: Run, case: str) -> Report:
    """One generation for two micro-batches."""
    reward = Letters()
    args = GRPOConfig(
        **options(run, case, gradient_accumulation_steps=2, shuffle_dataset=False, loss_type="grpo")
    )
    return rewarded(run, case, GRPOTrainer(model(run), reward, args, prompts(run)), reward)


def adapters(run: Run, case: str) -> Report:
    reward, args = Letters(), GRPOConfig(**options(run, case, beta=0.1, learning_rate=1e-2))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return rewarded(
        run, case, GRPOTrainer(model(run), reward, args, prompts(run), peft_config=lora), reward
    )


def judged(run: Run, case: str) -> Report:
    """A reward model beside the reward function, and a reference that follows the policy."""
    reward, args = (
        Letters(),
        GRPOConfig(**options(run, case, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)),
    )
    return rewarded(
        run, case, GRPOTrainer(model(run), [reward, run.model("judge")], args, prompts(run)), reward
    )


def rloo(run: Run, case: str) -> Report:
    reward, args = Letters(), RLOOConfig(**options(run, case))
    return rewarded(run, case, RLOOTrainer(model(run), reward, args, prompts(run)), reward)


CASES = {
    "gathered": gathered,
    "sharded": sharded,
    "evaluated": evaluated,
    "windows": windows,
    "adapters": adapters,
    "judged": judged,
    "rloo": rloo,
}
