"""Reinforcement learning of a causal language model with TRL's GRPOTrainer: it is rewarded for what
it says.

accelerate launch --config_file cpu.yaml run_grpo.py
accelerate launch --config_file 8_gpus.yaml run_grpo.py --use_vllm --vllm_mode colocate \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name trl-lib/DeepMath-103K \
    --reward accuracy_reward
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

try:
    import trl.rewards
    from trl import (
        GRPOConfig,
        GRPOTrainer,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_peft_config,
    )
except ModuleNotFoundError as error:
    sys.exit(f"{error}: this recipe needs pip install 'hf-zero[trl]'")

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import (
    DEFAULTS,
    Measured,
    load_causal,
    load_data,
    options_of,
    paragraphs,
    parse_arguments,
)


@dataclass
class Rewards:
    reward: Literal[
        "small_letters", "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"
    ] = field(default="small_letters", metadata={"help": "this script's, or one of trl.rewards"})


def small_letters(completions: list[Any], **columns: Any) -> list[float]:
    """The part of a completion that is a small letter or a space."""
    return [
        sum(letter.islower() or letter == " " for letter in text) / max(1, len(text))
        for text in completions
    ]


def questions() -> list[dict[str, Any]]:
    return [{"prompt": f"What is said about {name}? "} for name, _ in paragraphs()[:600]]


def main() -> None:
    parser = TrlParser((ScriptArguments, ModelConfig, Rewards, GRPOConfig))
    parser.set_defaults(
        **DEFAULTS | {"eval_strategy": "no", "eval_on_start": False, "logging_steps": 1},
        output_dir="runs/grpo", learning_rate=3e-3, num_generations=8, max_completion_length=16,
        lora_target_modules=["all-linear"], dtype=None,  # as the checkpoint has it
    )  # fmt: skip
    data, names, rewards, args = parse_arguments(parser)
    reward = getattr(trl.rewards, rewards.reward, small_letters)
    splits = (data.dataset_train_split, data.dataset_test_split)
    train, test = load_data(data.dataset_name, data.dataset_config, questions, splits)
    model, tokenizer = load_causal(names.model_name_or_path, **options_of(names, args))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        peft_config=get_peft_config(names),
        callbacks=[Measured("grpo", {"reward": "reward"}, "mean over a step")],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
