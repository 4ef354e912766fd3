"""Gathers within a node (hpZ), and in two hops across nodes, over gloo, from process to process:
the weights are bit for bit those of gathers over all ranks, the messages of a backward stay in the
node, and no rank waits in a circle where ranks leave out different blocks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests.helpers.engines import OnEngine, config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import squared
from tests.helpers.training import At, Plan, adamw, plain_sgd, train
from tests.helpers.ways import WAYS

RANKS, NODE = 4, 2


def trained_twice(rank):
    peers: list[int] = []
    isend = dist.isend

    def counted(tensor, *args, **kwargs):
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


def apart_in_two_hops(rank):
    """Ranks that skip other blocks in each step: weights, and bytes sent to another node."""
    sent: list[int] = []
    isend, job = dist.isend, WAYS["each rank skips another block, by step"]

    def counted(tensor, peer, *args, **kwargs):
        sent.append(tensor.nbytes * (peer // NODE != rank // NODE))
        return isend(tensor, peer, *args, **kwargs)

    os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    dist.isend, answers = counted, []
    for hops in (False, True):
        say(f"two hops: {hops}")
        sent.clear()
        plan = Plan(ranks=RANKS, steps=3)
        config = config_of(3, plan)
        config["zero_optimization"].update(
            stage3_param_persistence_threshold=0,
            stage3_module_granularity_threshold=0,
            mics_hierarchical_params_gather=hops,
        )
        model = job.build()
        session = OnEngine(start(model, plain_sgd(model), config), plan)
        losses = train(session, job, plan, rank).losses
        answers.append((losses, full_weights(session.engine), sum(sent)))
        session.close()
    return answers


def test_two_hops_over_gloo():
    for (losses, without, most), (found, within, less) in run_processes(RANKS, apart_in_two_hops):
        assert found == losses
        assert all(torch.equal(within[name], without[name]) for name in without)
        assert less < 0.85 * most  # reductions are what they were


def test_over_gloo():
    for (without, _), (within, counts) in run_processes(RANKS, trained_twice):
        assert all(torch.equal(within[name], without[name]) for name in without)
        for gathers, near, sent in counts[1:]:
            # reductions go to all three others, gathers to one
            reductions = (sent - gathers) // 3
            assert gathers > 2 and near == gathers + reductions
