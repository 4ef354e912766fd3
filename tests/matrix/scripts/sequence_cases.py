"""A stock Trainer; at a ``--stage`` ranks share sequences, by heads or in a ``--ring``, or in rings
of ranks that exchange ``--heads``.
"""

import torch
import transformers
from accelerate import ParallelismConfig
from script import RANK, given, report

from tests.helpers.models import VOCAB, seeded
from tests.helpers.sequences import TOKENS, llama
from tests.helpers.trainers import options, weights


def arguments(out, stage, **changes):
    sizes = {"cp_size": 2} if args.ring else {"sp_size": 2, "sp_backend": "deepspeed"}
    parallel = {
        "deepspeed": {"zero_optimization": {"stage": stage}, "sequence_parallel_size": args.heads},
        "parallelism_config": ParallelismConfig(**sizes),
    }
    chosen = {"use_cpu": stage < 0, "per_device_train_batch_size": 2, "adam_epsilon": 1e-4}
    return options(out, **chosen, **changes, **(parallel if stage >= 0 else {}))


def trainer(out, stage):
    """Rows have as many labels each, so that a mean over micro-batches is one over rows."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (16, TOKENS), generator=generator)
    rows = [
        {"input_ids": row, "labels": torch.where(torch.arange(TOKENS) < 5, -100, row)}
        for row in ids
    ]
    chosen = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 4}
    args = transformers.TrainingArguments(
        **arguments(out, stage, max_steps=4, per_device_eval_batch_size=1, **chosen)
    )
    run = transformers.Trainer(
        seeded(llama),
        args,
        train_dataset=rows,
        eval_dataset=rows[:6],
        data_collator=transformers.default_data_collator,
    )
    run.train()
    torch.save(weights(run), out / f"weights-{RANK}.pt")
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")
    history = run.state.log_history
    found = {"log": [{key: entry[key] for key in kept if key in entry} for entry in history]}
    if stage >= 0:
        engine = run.model_wrapped
        found["stage"], found["batch"] = engine.zero_optimization_stage(), engine.train_batch_size()
        found["total"] = run.get_total_train_batch_size(args)
    return found


args = given("ring", stage=-1, heads=1)
report(args.out, trainer(args.out, args.stage))
