"""Every case of TRL's trainers, a row each, by the name of its trainer and its own: ``--cases
sft.packed,dpo.adapters``.
"""

from datasets import concatenate_datasets
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
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


def completions(run):
    return run.rows().select_columns(["prompt", "chosen"]).rename_column("chosen", "completion")


def pairs(run):
    return run.rows().select_columns(["chosen", "rejected"])


def turns(run):
    def talk(row):
        said = (("user", row["prompt"]), ("assistant", row["chosen"]))
        return {"messages": [{"role": role, "content": text} for role, text in said]}

    found = run.rows()
    return found.map(talk, remove_columns=found.column_names)


def judged(run):
    """Every completion alone, with whether it is wanted."""
    found = run.rows()
    kinds = [(found, "chosen", True), (found, "rejected", False)]
    alone = [
        kind.select_columns(["prompt", name])
        .rename_column(name, "completion")
        .add_column("label", [wanted] * len(kind))
        for kind, name, wanted in kinds
    ]
    return concatenate_datasets(alone)


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

HALF = {  # two micro-batches a step
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": lambda run: 2 // run.world,
}
# For losses that are means over the tokens of a batch: only of batches of one row is the mean the
# same for any number of ranks.
ROW_BY_ROW = {
    "max_length": 128,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": lambda run: ROWS // run.world,
}
ADAPTED = {"given": {"peft_config": lora}, "learning_rate": 1e-2}


def sft(data, **options):
    return row(SFTTrainer, SFTConfig, data, **options)


def dpo(**options):
    return row(DPOTrainer, DPOConfig, rows, max_length=128, **options)


def sampled(trainer, config, rewards=lambda run: Letters(), given=None, **options):
    given = {"reward_funcs": rewards, **(given or {})}
    sizes = {"max_completion_length": 24, "num_generations": GROUP}
    return row(trainer, config, prompts, model, given=given, **sizes, **options)


def grpo(**options):
    return sampled(GRPOTrainer, GRPOConfig, **options)


def kto(**options):
    """The loss without the estimate of the divergence, which TRL makes from neighbours in a
    rank's own batch.
    """
    chosen = {"max_length": 128, "loss_type": "apo_zero_unpaired", **options}
    return row(KTOTrainer, KTOConfig, judged, **chosen)


def resumed(run, case):
    """Interrupted after the second step, and resumed by another trainer."""
    made = dpo(save_strategy="steps", save_steps=2).made
    made(run, case)[0].train()
    again, _ = made(run, case)
    return trained(again, run, case, resume=str(run.out / case / "checkpoint-2"))


def evaluated(run, case):
    """Evaluation generates, too: before there is an engine, and in the middle of training."""
    trainer, _ = grpo(
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        per_device_eval_batch_size=GROUP,
        loss_type="grpo",
        given={"eval_dataset": lambda run: prompts(run).select(range(4))},
    ).made(run, case)
    before = trainer.evaluate()
    return {**trained(trainer, run, case), "before": [before["eval_loss"], before["eval_reward"]]}


CASES = {
    "sft.plain": sft(texts, model=named("tied"), evaluated=True, max_length=48),
    "sft.packed": sft(texts, max_length=64, packing=True, packing_strategy="wrapped"),
    "sft.packed_bfd": sft(texts, max_length=64, packing=True),
    "sft.completion": sft(completions, max_length=96, completion_only_loss=True, **HALF),
    "sft.assistant": sft(turns, model=named("tied"), max_length=96, assistant_only_loss=True),
    "sft.adapters": sft(texts, max_length=48, **ADAPTED),
    # a forward for the loss and one without gradients for the metrics, in one step
    "sft.smoothed": sft(texts, max_length=48, label_smoothing_factor=0.1),
    # the reference is the model itself as it is on disk, loaded by TRL
    "dpo.implied": dpo(model=named("tied"), evaluated=True),
    "dpo.explicit": dpo(given={"ref_model": loaded("reference")}, **HALF),
    # the reference follows the model
    "dpo.synchronised": dpo(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5),
    "dpo.precomputed": dpo(precompute_ref_log_probs=True, evaluated=True),
    "dpo.adapters": dpo(**ADAPTED),
    "dpo.adapters_precomputed": dpo(precompute_ref_log_probs=True, **ADAPTED),
    "dpo.adapters_given": dpo(model=adapted, learning_rate=1e-2),
    "dpo.resumed": resumed,
    # the head that the checkpoint lacks is made, trained and saved
    "reward.plain": row(
        RewardTrainer,
        RewardConfig,
        pairs,
        evaluated=True,
        max_length=64,
        center_rewards_coefficient=0.01,
    ),
    "reward.adapters": row(
        RewardTrainer,
        RewardConfig,
        pairs,
        given={"peft_config": lambda run: lora(run, "SEQ_CLS", modules_to_save=["score"])},
        max_length=64,
        learning_rate=1e-2,
    ),
    # weights whole while generating (TRL's default); each batch used twice; a reference model
    "grpo.gathered": grpo(beta=0.1, num_iterations=2, max_steps=4),
    # gathered unit by unit in every decoding step, by ranks whose rows end at different steps
    "grpo.sharded": grpo(ds3_gather_for_generation=False),
    "grpo.evaluated": evaluated,
    # one generation for two micro-batches
    "grpo.windows": grpo(gradient_accumulation_steps=2, shuffle_dataset=False, loss_type="grpo"),
    "grpo.adapters": grpo(beta=0.1, **ADAPTED),
    # a reward model beside the reward function, and a reference that follows the policy
    "grpo.judged": grpo(
        rewards=lambda run: [Letters(), run.model("judge")],
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
    ),
    "grpo.rloo": sampled(RLOOTrainer, RLOOConfig),
    "more.kto": kto(),
    "more.kto_precomputed": kto(precompute_ref_log_probs=True),
    "more.orpo": row(
        ORPOTrainer,
        ORPOConfig,
        rows,
        loaded("untied"),
        given={"processing_class": tokenizer},
        **ROW_BY_ROW,
    ),
    "more.cpo": row(
        CPOTrainer,
        CPOConfig,
        rows,
        loaded("untied"),
        given={"processing_class": tokenizer},
        **ROW_BY_ROW,
    ),
    # pairs out of the model's own completions; TRL copies no reference at stage 3
    "more.online": row(
        OnlineDPOTrainer,
        OnlineDPOConfig,
        prompts,
        lambda run: HalvesLlama.from_pretrained(run.model("untied")),
        given={
            "ref_model": loaded("untied"),
            "reward_funcs": lambda run: Letters(),
            "processing_class": tokenizer,
        },
        max_new_tokens=24,
        max_length=128,
    ),
    # the student's completions, judged by a teacher whose head is used outside its own forward
    "more.distilled": row(
        DistillationTrainer,
        DistillationConfig,
        prompts,
        model,
        given={"teacher_model": named("reference")},
        max_completion_length=24,
    ),
}

if __name__ == "__main__":
    Run().main(CASES)
