"""TRL's other trainers: KTO, ORPO, CPO, online DPO, and distillation from a teacher."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_drawing import DrawingLlama, Letters, model, prompts
from trl_run import ROWS, Report, Run, trained


class HalvesLlama(DrawingLlama):
    halves = True


def judged(run: Run) -> Dataset:
    """Every completion alone, with whether it is wanted."""
    rows = run.rows()
    kinds = [(rows, "chosen", True), (rows, "rejected", False)]
    alone = [
        kind.select_columns(["prompt", name])
        .rename_column(name, "completion")
        .add_column("label", [wanted] * len(kind))
        for kind, name, wanted in kinds
    ]
    return concatenate_datasets(alone)


def kto(run: Run, case: str) -> Report:
    """The loss without the estimate of the divergence, which TRL makes from neighbours in a
    rank's own batch.
    """
    args = KTOConfig(**run.options(case, max_length=128, loss_type="apo_zero_unpaired"))
    return trained(KTOTrainer(run.model("untied"), args=args, train_dataset=judged(run)), run, case)


def kto_precomputed(run: Run, case: str) -> Report:
    args = KTOConfig(
        **run.options(
            case, max_length=128, loss_type="apo_zero_unpaired", precompute_ref_log_probs=True
        )
    )
    return trained(KTOTrainer(run.model("untied"), args=args, train_dataset=judged(run)), run, case)


def row_by_row(run: Run, case: str) -> dict[str, Any]:
    """For losses that are means over the tokens of a batch: only of batches of one row is the
    mean the same for any number of ranks.
    """
    return run.options(
        case,
        max_length=128,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS // run.world,
    )


def orpo(run: Run, case: str) -> Report:
    args = ORPOConfig(**row_by_row(run, case))
    tokenizer = AutoTokenizer.from_pretrained(run.model("untied"))
    net = AutoModelForCausalLM.from_pretrained(run.model("untied"))
    return trained(
        ORPOTrainer(net, args, train_dataset=run.rows(), processing_class=tokenizer), run, case
    )


def cpo(run: Run, case: str) -> Report:
    args = CPOConfig(**row_by_row(run, case))
    tokenizer = AutoTokenizer.from_pretrained(run.model("untied"))
    net = AutoModelForCausalLM.from_pretrained(run.model("untied"))
    return trained(
        CPOTrainer(net, args, train_dataset=run.rows(), processing_class=tokenizer), run, case
    )


def online(run: Run, case: str) -> Report:
    """Pairs out of the model's own completions."""
    reward, args = (
        Letters(),
        OnlineDPOConfig(**run.options(case, max_new_tokens=24, max_length=128)),
    )
    net, tokenizer = (
        HalvesLlama.from_pretrained(run.model("untied")),
        AutoTokenizer.from_pretrained(run.model("untied")),
    )
    # TRL copies none at stage 3
    reference = AutoModelForCausalLM.from_pretrained(run.model("untied"))
    trainer = OnlineDPOTrainer(
        net, reference, reward, args, train_dataset=prompts(run), processing_class=tokenizer
    )
    return {**trained(trainer, run, case), "completions": reward.seen}


def distilled(run: Run, case: str) -> Report:
    """The student's completions, judged by a teacher whose head is used outside its own forward."""
    args = DistillationConfig(**run.options(case, max_completion_length=24))
    return trained(
        DistillationTrainer(model(run), run.model("reference"), args, prompts(run)), run, case
    )


CASES = {
    "kto": kto,
    "kto_precomputed": kto_precomputed,
    "orpo": orpo,
    "cpo": cpo,
    "online": online,
    "distilled": distilled,
}
