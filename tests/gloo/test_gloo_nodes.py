"""Gathers within a node (hpZ) over gloo, from process to process: the weights are bit for bit those
of gathers over all ranks, and the messages of a backward stay in the node.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import squared
from tests.helpers.training import At, Plan, adamw

RANKS, NODE = 4, 2


def trained_twice(rank: int) -> list[Any]:
    peers: list[int] = []
    isend = dist.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        peers.append(args[0])
        return isend(tensor, *args, **kwargs)

    dist.isend = counted
    answers = []
    for node in (1, NODE):
        say(f"nodes of {node}")
        config = config_of(3, Plan(precision="bf16"))
        config["zero_optimization"].update(
            stage3_param_persistence_threshold=0, zero_hpz_partition_size=node
        )
        model = seeded(lambda: Stack(4))
        engine = start(model, adamw(model), config)
        near = []
        for step in range(3):
            loss = squared(engine, At(step, 0, rank), torch.bfloat16)
            engine.mesh.stats.keep_log = True
            engine.mesh.stats.log.clear()
            peers.clear()
            engine.backward(loss)
            gathers = [name for name, *_ in engine.mesh.stats.log].count("all_gather")
            near.append((gathers, sum(peer // NODE == rank // NODE for peer in peers), len(peers)))
            engine.step()
        answers.append((full_weights(engine), near))
        engine.destroy()
    return answers


def test_over_gloo() -> None:
    for (without, _), (within, counts) in run_processes(RANKS, trained_twice):
        assert all(torch.equal(within[name], without[name]) for name in without)
        for gathers, near, sent in counts[1:]:
            # reductions go to all three others, gathers to one
            reductions = (sent - gathers) // 3
            assert gathers > 2 and near == gathers + reductions
