"""TRL's SFTTrainer, all weights and LoRA, at stage 3 where there are several ranks, plainly in one
process.
"""

from datasets import load_dataset
from script import WORLD, given, report
from torch.cuda import is_available
from trl import SFTConfig, SFTTrainer

from tests.helpers.trainers import logged, options

STEPS, ROWS = 4, 4  # rows of a step over all ranks
CASES = ("all weights", "LoRA")


def trained(case, args):
    data = str(args.model.rstrip("/") + "/rows.jsonl")
    rows = load_dataset("json", data_files=data, split="train", cache_dir=str(args.out / "cache"))
    rows = rows.select_columns("prompt").rename_column("prompt", "text")
    chosen = options(args.out / case, use_cpu=not is_available(), bf16=False, max_length=64)
    chosen |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS // WORLD}
    more = {}
    if WORLD > 1:
        chosen["deepspeed"] = {"zero_optimization": {"stage": 3}}
    if case == "LoRA":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    run = SFTTrainer(f"{args.model}/model", SFTConfig(**chosen), train_dataset=rows, **more)
    run.train()
    told = {key: logged(run, key) for key in ("loss", "grad_norm")}
    return {**told, "kind": type(run.model_wrapped).__name__}


def main():
    args = given(model="")
    report(args.out, {case: trained(case, args) for case in CASES})


if __name__ == "__main__":
    main()
