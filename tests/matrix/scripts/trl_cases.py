"""Cases of TRL's trainers, by the name of the trainer and their own: ``--cases dpo.resumed``."""

import trl
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl_drawing import GROUP, DrawingLlama, Letters, model, prompts
from trl_run import Run, trained


def named(name):
    return lambda run: run.model(name)


def loaded(name):
    return lambda run: AutoModelForCausalLM.from_pretrained(run.model(name))


UNTIED = named("untied")


def row(trainer, config, data, model=UNTIED, evaluated=False, given=None, **options):
    """The trainer of ``config(**options)`` over ``data``; functions are given the run."""
    if evaluated:
        options.update(eval_strategy="steps", eval_steps=2)

    def made(run, case, **more):
        chosen = {name: each(run) if callable(each) else each for name, each in options.items()}
        args = config(**run.options(case, **chosen, **more))
        rest = {name: each(run) for name, each in (given or {}).items()}
        if evaluated:
            rest["eval_dataset"] = data(run).select(range(8))
        return trainer(model(run), args=args, train_dataset=data(run), **rest), rest

    def train(run, case):
        built, rest = made(run, case)
        report = trained(built, run, case)
        if "reward_funcs" not in rest:
            return report
        rewards = rest["reward_funcs"]
        letters = rewards[0] if isinstance(rewards, list) else rewards
        return {**report, "completions": letters.seen}

    train.made = made
    return train


# ---- data, models and adapters ----


def rows(run):
    return run.rows()


def texts(run):
    return run.rows().select_columns("prompt").rename_column("prompt", "text")


def lora(run):
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


class HalvesLlama(DrawingLlama):
    halves = True


def tokenizer(run):
    return AutoTokenizer.from_pretrained(run.model("untied"))


# ---- the rows ----

ADAPTED = {"given": {"peft_config": lora}, "learning_rate": 1e-2}


def sft(data, **options):
    return row(trl.SFTTrainer, trl.SFTConfig, data, **options)


def dpo(**options):
    return row(trl.DPOTrainer, trl.DPOConfig, rows, max_length=128, **options)


def sampled(trainer, config, rewards=lambda run: Letters(), given=None, **options):
    given = {"reward_funcs": rewards, **(given or {})}
    sizes = {"max_completion_length": 24, "num_generations": GROUP}
    return row(trainer, config, prompts, model, given=given, **sizes, **options)


def online(data, tokenizer, **options):
    given = {"ref_model": loaded("untied"), "reward_funcs": lambda run: Letters()}
    return row(
        OnlineDPOTrainer,
        OnlineDPOConfig,
        data,
        lambda run: HalvesLlama.from_pretrained(run.model("untied")),
        given={**given, "processing_class": tokenizer},
        max_new_tokens=24,
        max_length=128,
        **options,
    )


def grpo(**options):
    return sampled(trl.GRPOTrainer, trl.GRPOConfig, **options)


def resumed(run, case):
    """Interrupted after the second step, and resumed by another trainer."""
    made = dpo(save_strategy="steps", save_steps=2).made
    made(run, case)[0].train()
    again, _ = made(run, case)
    return trained(again, run, case, resume=str(run.out / case / "checkpoint-2"))


CASES = {
    "sft.adapters": sft(texts, max_length=48, **ADAPTED),
    # the reference is the model itself as it is on disk, loaded by TRL
    "dpo.implied": dpo(model=named("tied"), evaluated=True),
    "dpo.precomputed": dpo(precompute_ref_log_probs=True, evaluated=True),
    "dpo.resumed": resumed,
    # gathered unit by unit in every decoding step, by ranks whose rows end at different steps
    "grpo.sharded": grpo(ds3_gather_for_generation=False),
    # weights whole while generating (TRL's default); each batch used twice; a reward model beside
    # the reward function, and a reference that follows the policy
    "grpo.judged": grpo(
        rewards=lambda run: [Letters(), run.model("judge")],
        beta=0.1,
        num_iterations=2,
        max_steps=4,
        sync_ref_model=True,
        ref_model_sync_steps=1,
    ),
    # pairs out of the model's own completions; TRL copies no reference at stage 3
    "more.online": online(prompts, tokenizer),
    # the student's completions, judged by a teacher whose head is used outside its own forward
    "more.distilled": row(
        trl.DistillationTrainer,
        trl.DistillationConfig,
        prompts,
        model,
        given={"teacher_model": named("reference")},
        max_completion_length=24,
    ),
}

if __name__ == "__main__":
    Run().main(CASES)
