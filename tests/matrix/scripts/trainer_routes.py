"""Trainers on the ranks of a launcher by every route to ZeRO, one after another.

``--what routes``: every stage and route, after a plain Trainer under DDP. ``--what launched``:
stock arguments alone; the launcher brings the ZeRO config.
"""

import argparse
import gc
import json
import os
from pathlib import Path

import torch
import transformers

import hf_zero
from tests.helpers.trainers import logged, routed, rows, weights

torch.set_num_threads(1)
STEPWISE = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def state(run):
    """Return this rank's view of itself, and the results of its training."""
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
        "tokens_per_second": logged(run, "tokens_per_second"),
        "memory_mib": logged(run, "memory_mib"),
    }
    if isinstance(engine, hf_zero.Engine):
        seen |= {
            "stage": engine.stage,
            "shards": engine.shard_world,
            "rank": engine.global_rank,
            "bytes": engine.state_bytes(),
        }
    return seen


def train(route, stage, folder, **changes):
    run = routed(route, stage, folder, gradient_accumulation_steps=2, **changes)
    run.train()
    return state(run) | {
        "digest": float(sum(v.double().abs().sum() for v in weights(run).values()))
    }


def routes(folder):
    seen = {"ddp": train("plain", 0, folder / "ddp")}
    for stage in range(4):
        # Without use_cpu Accelerate believes each rank to be alone, until ZeRO is asked for.
        seen[f"ours{stage}"] = train("ours", stage, folder / f"ours{stage}", use_cpu=stage < 2)
    seen["callback3"] = train("callback", 3, folder / "callback", use_cpu=False)
    seen["stock3"] = train("stock", 3, folder / "stock")
    seen["plain again"] = train("plain", 0, folder / "plain")
    seen["whole"], seen["resumed"] = interrupted(folder / "resumed", 3)
    return seen


def interrupted(folder, stage):
    """An evaluation, a whole run with checkpoints, its weights saved; then a run that resumes from
    the second step.
    """
    before = routed("plain", 0, folder).evaluate()["eval_loss"]
    run = routed("ours", stage, folder, **STEPWISE)
    evaluated = run.evaluate()["eval_loss"]
    rows_seen = run.predict(rows()[:5]).predictions.shape[0]
    run.train()
    whole = state(run) | {"expected before": before, "before": evaluated, "predicted": rows_seen}
    run.save_model(str(folder / "saved"))
    torch.distributed.barrier()
    saved = transformers.AutoModelForMaskedLM.from_pretrained(folder / "saved").state_dict()
    whole["saved"] = all(torch.equal(saved[name], value) for name, value in weights(run).items())
    del run
    gc.collect()

    run = routed("ours", stage, folder, **STEPWISE, load_best_model_at_end=True)
    run.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    # The best model is loaded by now, so the curve is compared, and the best loss found again.
    return whole, state(run) | {
        "best": run.state.best_metric,
        "found again": run.evaluate()["eval_loss"],
    }


def launched(folder):
    before = routed("plain", 0, folder / "launched", use_cpu=False).evaluate()["eval_loss"]
    return {"launched": train("plain", 0, folder / "launched", use_cpu=False) | {"before": before}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--what", choices=["routes", "launched"], required=True)
    args = parser.parse_args()
    report = {"routes": routes, "launched": launched}[args.what](args.out)
    (args.out / f"report-{os.environ['RANK']}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()
