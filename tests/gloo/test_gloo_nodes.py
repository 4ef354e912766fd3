"""Gathers within a node (hpZ), and in two hops across nodes, over gloo, from process to process:
the weights are bit for bit those of gathers over all ranks, the messages of a backward stay in the
node, and no rank waits in a circle where ranks leave out different blocks.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.helpers.engines import OnEngine, config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import squared
from tests.helpers.training import At, Plan, adamw, plain_sgd, train
from tests.helpers.ways import WAYS

RANKS, NODE = 4, 2


@contextmanager
def messages():
    """The messages that this process sends: the receiver and the bytes of each."""
    sent, isend = [], dist.isend

    def counted(tensor, peer, *args, **kwargs):
        sent.append((peer, tensor.nbytes))
        return isend(tensor, peer, *args, **kwargs)

    dist.isend = counted
    yield sent
    dist.isend = isend


def trained_twice(rank):
    answers = []
    for node in (1, NODE):
        say(f"nodes of {node}")
        config = config_of(3, Plan(precision="bf16"))
        hpz = {"stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": node}
        config["zero_optimization"].update(hpz)
        model, near = seeded(lambda: Stack(4)), []
        engine = start(model, adamw(model), config)
        for step in range(3):
            loss = squared(engine, At(step, 0, rank), torch.bfloat16)
            engine.mesh.stats.keep_log = True
            engine.mesh.stats.log.clear()
            with messages() as sent:
                engine.backward(loss)
            gathers = [name for name, *_ in engine.mesh.stats.log].count("all_gather")
            near.append((gathers, sum(peer // NODE == rank // NODE for peer, _ in sent), len(sent)))
            engine.step()
        answers.append((full_weights(engine), near))
        engine.destroy()
    return answers


def apart_in_two_hops(rank):
    """Ranks that skip other blocks in each step: weights, and bytes sent to another node."""
    job, plan, answers = WAYS["each rank skips another block, by step"], Plan(RANKS, steps=3), []
    os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    for hops in (False, True):
        say(f"two hops: {hops}")
        config, model = config_of(3, plan), job.build()
        config["zero_optimization"].update(
            stage3_param_persistence_threshold=0,
            stage3_module_granularity_threshold=0,
            mics_hierarchical_params_gather=hops,
        )
        with messages() as sent:
            session = OnEngine(start(model, plain_sgd(model), config), plan)
            losses = train(session, job, plan, rank).losses
            weights = full_weights(session.engine)
        far = sum(nbytes for peer, nbytes in sent if peer // NODE != rank // NODE)
        answers.append((losses, weights, far))
        session.close()
    return answers


def both(rank):
    return trained_twice(rank), apart_in_two_hops(rank)


def test_over_gloo():
    for ((without, _), (within, counts)), hops in run_processes(RANKS, both):
        assert all(torch.equal(within[name], without[name]) for name in without)
        for gathers, near, sent in counts[1:]:
            # reductions go to all three others, gathers to one
            reductions = (sent - gathers) // 3
            assert gathers > 2 and near == gathers + reductions
        (losses, without, most), (found, within, less) = hops
        assert found == losses
        assert all(torch.equal(within[name], without[name]) for name in without)
        assert less < 0.85 * most  # reductions are what they were
