"""Every case of TRL's trainers, a row each, by the name of its trainer and its own: ``--cases
sft.packed,dpo.adapters``.
"""

import trl
from datasets import concatenate_datasets
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_drawing import GROUP, DrawingLlama, Letters, model, prompts
from trl_run import ROWS, Run, trained


def named(name):
    return lambda run: run.model(name)


def loaded(name):
    return lambda run: AutoModelForCausalLM.from_pretrained(run.model(name))


UNTIED = named("untied")


def row(trainer, config, data, model=UNTIED, evaluated=False, given=None, **options):
    """A case: the trainer of ``config(**options)`` over ``data``, with the arguments ``given``.
    What a case needs of its run is a function of it.
    """
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


def pairs(run):
    return run.rows().select_columns(["chosen", "rejected"])


def judged(run):
    """Every completion alone, with whether it is wanted."""
    found = run.rows()
    kinds = [(found, "chosen", True), (found, "rejected", False)]
    alone = [
        kind.select_columns(["prompt", name]).rename_column(name, "completion")
        for kind, name, _ in kinds
    ]
    labels = [[wanted] * len(kind) for kind, _, wanted in kinds]
    return concatenate_datasets([a.add_column("label", b) for a, b in zip(alone, labels)])


def lora(run, task="CAUSAL_LM", **more):
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=task, **more)


def adapted(run):
    """The model comes with adapters: TRL freezes a copy of them as the reference."""
    set_seed(5)
    return get_peft_model(loaded("untied")(run), lora(run))


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


def row_by_row(trainer, config):
    """For losses that are means over the tokens of a batch: only of batches of one row is the mean
    the same for any number of ranks.
    """
    sizes = {"max_length": 128, "per_device_train_batch_size": 1}
    windows = {"gradient_accumulation_steps": lambda run: ROWS // run.world}
    given = {"processing_class": tokenizer}
    return row(trainer, config, rows, loaded("untied"), given=given, **sizes, **windows)


def reward(**options):
    return row(trl.RewardTrainer, trl.RewardConfig, pairs, max_length=64, **options)


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
    "sft.plain": sft(texts, model=named("tied"), evaluated=True, max_length=48),
    "sft.adapters": sft(texts, max_length=48, **ADAPTED),
    # a forward for the loss and one without gradients for the metrics, in one step
    "sft.smoothed": sft(texts, max_length=48, label_smoothing_factor=0.1),
    # the reference is the model itself as it is on disk, loaded by TRL
    "dpo.implied": dpo(model=named("tied"), evaluated=True),
    # the reference follows the model
    "dpo.synchronised": dpo(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5),
    "dpo.precomputed": dpo(precompute_ref_log_probs=True, evaluated=True),
    "dpo.adapters": dpo(**ADAPTED),
    "dpo.adapters_given": dpo(model=adapted, learning_rate=1e-2),
    "dpo.resumed": resumed,
    # the head that the checkpoint lacks is made, trained and saved
    "reward.plain": reward(evaluated=True, center_rewards_coefficient=0.01),
    "reward.adapters": reward(
        given={"peft_config": lambda run: lora(run, "SEQ_CLS", modules_to_save=["score"])},
        learning_rate=1e-2,
    ),
    # weights whole while generating (TRL's default); each batch used twice; a reference model
    "grpo.gathered": grpo(beta=0.1, num_iterations=2, max_steps=4),
    # gathered unit by unit in every decoding step, by ranks whose rows end at different steps
    "grpo.sharded": grpo(ds3_gather_for_generation=False),
    "grpo.adapters": grpo(beta=0.1, **ADAPTED),
    # a reward model beside the reward function, and a reference that follows the policy
    "grpo.judged": grpo(
        rewards=lambda run: [Letters(), run.model("judge")],
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
    ),
    "grpo.rloo": sampled(trl.RLOOTrainer, trl.RLOOConfig),
    # the loss without the estimate of the divergence, which TRL makes from neighbours in a rank's
    # own batch
    "more.kto": row(
        trl.KTOTrainer, trl.KTOConfig, judged, max_length=128, loss_type="apo_zero_unpaired"
    ),
    "more.orpo": row_by_row(ORPOTrainer, ORPOConfig),
    "more.cpo": row_by_row(CPOTrainer, CPOConfig),
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
