"""Trainers as scripts write them, one after another: a case is a route to ZeRO with a stage
(``ours3``, ``ddp0``).
"""

from script import WORLD, given, report
from torch.cuda import is_available

import hf_zero
from tests.helpers.trainers import logged, routed, weights

WINDOW = {"gradient_accumulation_steps": 4 // WORLD}


def state(run):
    """Return this rank's view of itself, and the results of its training."""
    engine = run.model_wrapped
    seen = {
        "kind": type(engine).__name__,
        "distributed": str(run.accelerator.distributed_type).rpartition(".")[2],
        "world": [run.args.world_size, run.accelerator.num_processes],
        "main": run.is_world_process_zero(),
        "batches": len(run.get_train_dataloader()),
        "digest": float(sum(value.double().abs().sum() for value in weights(run).values())),
    }
    figures = ("tokens_per_second", "memory_mib")
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", *figures):
        seen[key] = logged(run, key)
    if isinstance(engine, hf_zero.Engine):
        place = {"stage": engine.stage, "rank": engine.global_rank}
        seen |= {**place, "bytes": engine.state_bytes()}
    return seen


def route(name, folder):
    kind, stage = name.rstrip("0123"), int(name[-1])
    # Without use_cpu Accelerate believes each rank to be alone, until ZeRO is asked for.
    cpu = {"use_cpu": not is_available() and (kind in ("ddp", "again", "stock") or stage < 2)}
    run = routed(kind, stage, folder, **WINDOW, **cpu)
    run.train()
    return state(run)


def main():
    args = given(cases=[])
    report(args.out, {case: route(case, args.out / case) for case in args.cases})


if __name__ == "__main__":
    main()
