"""Trainers on the ranks of a launcher, one after another; each rank writes what it saw to
``<folder>/rank<r>.json``.

``trainer_ranks.py <folder> routes``: every stage and route, after a plain Trainer under DDP.
``trainer_ranks.py <folder> launched``: stock arguments alone; the launcher brings the ZeRO config.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_zero
from tests.integrations.tiny_trainer import LENGTH, logged, options, rows, trainer, weights

torch.set_num_threads(1)
STEPWISE = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def state(run: transformers.Trainer) -> dict[str, Any]:
    """What this rank knows of itself, and how it trained."""
    engine = run.model_wrapped
    seen = {
        "kind": type(engine).__name__,
        "distributed": str(run.accelerator.distributed_type).rpartition(".")[2],
        "world": [run.args.world_size, run.accelerator.num_processes],
        "main": run.is_world_process_zero(),
        "batches": len(run.get_train_dataloader()),
        "loss": logged(run),
        "grad_norm": logged(run, "grad_norm"),
        "eval_loss": logged(run, "eval_loss"),
    }
    if isinstance(engine, hf_zero.Engine):
        seen |= {
            "stage": engine.stage,
            "shards": engine.shard_world,
            "rank": engine.global_rank,
            "bytes": engine.state_bytes(),
        }
    return seen


def digest(run: transformers.Trainer) -> float:
    return float(sum(value.double().abs().sum() for value in weights(run).values()))


def train(
    args: Any, resume: str | None = None, **changes: Any
) -> tuple[transformers.Trainer, dict[str, Any]]:
    run = trainer(args, **changes)
    run.train(resume_from_checkpoint=resume)
    return run, state(run)


def routes(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    run, seen["ddp"] = train(
        transformers.TrainingArguments(**options(folder / "ddp", gradient_accumulation_steps=2))
    )
    seen["ddp"]["digest"] = digest(run)
    for stage in range(4):
        config = {"zero_optimization": {"stage": stage}}
        # Without use_cpu Accelerate believes each rank to be alone, until ZeRO is asked for.
        chosen = options(folder / f"ours{stage}", gradient_accumulation_steps=2, use_cpu=stage < 2)
        args = hf_zero.TrainingArguments(**chosen, zero_config=config)
        run, seen[f"ours{stage}"] = train(args)
        seen[f"ours{stage}"]["digest"] = digest(run)
    args = transformers.TrainingArguments(
        **options(folder / "callback", gradient_accumulation_steps=2, use_cpu=False)
    )
    run, seen["callback3"] = train(args, callbacks=[hf_zero.ZeroCallback("zero3")])
    seen["callback3"] |= {
        "tokens_per_second": logged(run, "tokens_per_second"),
        "memory_mib": logged(run, "memory_mib"),
    }
    args = transformers.TrainingArguments(
        **options(folder / "stock", gradient_accumulation_steps=2),
        deepspeed={"zero_optimization": {"stage": 3}},
    )
    _, seen["stock3"] = train(args)
    _, seen["plain again"] = train(
        transformers.TrainingArguments(**options(folder / "plain", gradient_accumulation_steps=2))
    )
    seen["whole"], seen["resumed"] = interrupted(folder / "resumed", 3)
    return seen


def interrupted(folder: Path, stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An evaluation, a whole run with checkpoints, its weights saved; then a run that goes on
    from the second step.
    """
    plain = trainer(transformers.TrainingArguments(**options(folder)))
    before = plain.evaluate()["eval_loss"]

    args = hf_zero.TrainingArguments(**options(folder, **STEPWISE), zero_config=f"zero{stage}")
    run = trainer(args)
    evaluated = run.evaluate()["eval_loss"]
    rows_seen = run.predict(rows()[:5]).predictions.shape[0]
    run.train()
    whole = state(run) | {
        "expected before": before,
        "before": evaluated,
        "predicted": rows_seen,
        "digest": digest(run),
    }
    run.save_model(str(folder / "saved"))
    torch.distributed.barrier()
    saved = transformers.AutoModelForMaskedLM.from_pretrained(folder / "saved").state_dict()
    whole["saved"] = all(torch.equal(saved[name], value) for name, value in weights(run).items())
    del run
    gc.collect()

    args = hf_zero.TrainingArguments(
        **options(folder, **STEPWISE, load_best_model_at_end=True), zero_config=f"zero{stage}"
    )
    run = trainer(args)
    run.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    # The best model is loaded by now, so the curve is compared, and the best loss found again.
    return whole, state(run) | {
        "best": run.state.best_metric,
        "found again": run.evaluate()["eval_loss"],
    }


def launched(folder: Path) -> dict[str, Any]:
    run = trainer(
        transformers.TrainingArguments(
            **options(folder / "launched", gradient_accumulation_steps=2, use_cpu=False)
        )
    )
    before = run.evaluate()["eval_loss"]
    run.train()
    return {"launched": state(run) | {"before": before, "digest": digest(run), "length": LENGTH}}


if __name__ == "__main__":
    place, what = Path(sys.argv[1]), sys.argv[2]
    result = {"routes": routes, "launched": launched}[what](place)
    (place / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
