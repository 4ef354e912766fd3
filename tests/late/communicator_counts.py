"""The communicators that a step makes on one rank of the device, and those that preflight foresees:
``python -m tests.late.communicator_counts``, with RANK and so on set, and the device in the place
of CUDA. One line of JSON a case.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.late import device, families, training

import torch  # isort: skip
import hf_zero  # isort: skip
from hf_zero.distributed import world_group  # isort: skip
from hf_zero.launch.hosts import free_port  # isort: skip
from hf_zero.planning.estimate import estimate  # isort: skip
from hf_zero.config import ZeroConfig  # isort: skip
from hf_zero.distributed.parallel_dims import ParallelDims  # isort: skip
from hf_zero.planning.checking import communicators  # isort: skip
from hf_zero.zero.layout.planner import plan  # isort: skip

EXPERTS = families.EXPERTS
SEQUENCE, RING = {"sequence_parallel_size": 2}, {"context_parallel_size": 2}
# stage, keys of zero_optimization, other keys
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage 0": (0, {}, {}),
    "stage 3": (3, {}, {}),
    "stage 2, optimizer on the host": (2, training.OPTIMIZER, {}),
    "stage 3, in a node": (3, {"zero_hpz_partition_size": 2}, {}),
    "stage 3, replicas": (3, {"mics_shard_size": 2}, {}),
    "stage 3, parts of matrices": (3, {}, families.TENSOR),
    "stage 1, parts of matrices": (1, {}, families.TENSOR),
    "stage 3, parts of sequences": (3, {}, SEQUENCE),
    "stage 3, rings": (3, {}, RING),
    "stage 3, experts": (3, {}, EXPERTS),
}
OVER_HOSTS = {"stage 3, in two hops": (3, training.HOPS, {})}  # of two ranks each


def made() -> set[str]:
    """The communicators on which something was issued, which is what makes them; messages of a
    group that is bound to its device are on its own.
    """
    issued = [each["name"] for each in device.C.communicators() if each["issued"]]
    return {name.split(", messages")[0] for name in issued}


def ended(case: str, counted: int, foreseen: int) -> None:
    """Tell of a job, and end it: what is made next is another one's."""
    device.tell(case=case, made=counted, foreseen=foreseen, reports=device.reports())
    port = world_group.get_world_group().broadcast_object(free_port())
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)


def pipeline() -> None:
    """Two stages: nothing is sent over the group of all ranks, which is foreseen, and a tied weight
    takes two more, which are not.
    """
    before, after = made(), set[str]()
    training.train_pipeline("1f1b", lambda: after.update(made()))
    dims = ParallelDims.over(2, pipeline=2)
    foreseen = sum(communicators(plan(torch.nn.Module(), ZeroConfig(1), dims)).values())
    ended("pipeline", len(after - before), foreseen - 1 + 2)


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    device.begin("random")
    families.use_kernels_of_cpus()
    chosen = CASES | (OVER_HOSTS if world == 4 else {})
    asked = sys.argv[1:] or [*chosen, *(["pipeline"] if world == 2 else [])]
    if "pipeline" in asked:
        pipeline()
    for name, (stage, zero, more) in chosen.items():
        if name not in asked:
            continue
        before = made()
        plain = training.config("stage 1") | training.ONCE | more
        config = {**plain, "zero_optimization": {"stage": stage, **zero}}
        family = "mixtral" if more is EXPERTS else "llama"
        model = families.build(family, False, num_hidden_layers=2)
        foreseen = estimate(model, world, config=config).at(stage)
        engine, *_ = hf_zero.initialize(model=model, config=config)
        batch = {"input_ids": torch.arange(64, device=engine.device).view(4, 16)}
        batch["labels"] = batch["input_ids"]
        if more in (SEQUENCE, RING):
            batch = hf_zero.sequence_parallel().shard(batch)
        engine.backward(engine(**batch).loss)
        engine.step()
        device.synchronize_all()
        counted = len(made() - before)
        engine.destroy()
        ended(name, counted, foreseen.communicators)


if __name__ == "__main__":
    main()
