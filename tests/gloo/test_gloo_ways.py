"""The engine's features over real gloo processes: ways to call a model and a slice of the matrix,
few bits, messages of several units, gathers in two hops, loops over weights that are left early.
One launch runs many cases inside the same processes.
"""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import one_bit, oracle
from tests.helpers.compressed import GRADIENTS, check_gradients, compressible, trained
from tests.helpers.engines import (
    STAGES,
    OnEngine,
    config_of,
    engine_opener,
    full_weights,
    start,
    train_on_rank,
)
from tests.helpers.models import ARCHITECTURES, Stack, seeded
from tests.helpers.processes import run_processes, say
from tests.helpers.stacks import run_steps, stack
from tests.helpers.training import ArchitectureJob, Plan, adamw, merge, plain_sgd, train
from tests.helpers.ways import WAYS
from tests.ranks.test_small_blocks import BLOCK, joined

Cell = tuple[str, int, Plan]  # job, stage, plan


def job_of(name):
    return WAYS[name] if name in WAYS else ArchitectureJob(ARCHITECTURES[name])


def train_cells(rank, cells):
    traces = []
    for name, stage, plan in cells:
        say(f"{name} at stage {stage}, {plan}")
        job = job_of(name)
        traces.append(train_on_rank(rank, {rank: job.build()}, job, plan, engine_opener(stage)))
    return traces


def check(ranks, cells):
    answers = run_processes(ranks, train_cells, cells, timeout=600)
    for (name, stage, plan), traces in zip(cells, zip(*answers, strict=True), strict=True):
        try:
            oracle.accept(merge(traces), job_of(name), plan, stage)
        except AssertionError as error:
            raise AssertionError(f"{name!r} at stage {stage}: {error}") from error


def plan_of(ranks, **more):
    return Plan(**{"ranks": ranks, "steps": 3, "accumulation": 2, **more})


def test_an_architecture_at_each_stage_and_some_ways():
    """Stages 1 and 3 in 16 bits, and a way to call a model. Threads run all of them."""
    plan = plan_of(2, steps=2)
    cells: list[Cell] = [(name, stage, plan) for stage, name in zip(STAGES, ARCHITECTURES)]
    cells += [("bert", 1, plan_of(2, precision="fp16")), ("bert", 3, plan_of(2, precision="bf16"))]
    cells += [("each rank skips another block, by step", 3, plan_of(2))]
    check(2, cells)


@pytest.mark.long
def test_all_ways_on_three_processes():
    check(3, [(name, STAGES[at % 4], plan_of(3)) for at, name in enumerate(WAYS)])


# ---- fewer bits ----

RANKS = 3
ONE = Plan(precision="bf16")
CASES: list[tuple[int, Plan, dict[str, Any], dict[str, Any]]] = [
    (1, Plan(steps=2, precision="bf16"), {}, {"compressed_communication": {"bits": 4}}),
    (3, Plan(steps=2, precision="bf16"), {**GRADIENTS, "zero_quantized_weights": True}, {}),
]


def trained_in_turn(rank):
    sent: list[int] = []
    isend = dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    dist.isend = counted
    answers = []
    for stage, plan, zero, more in CASES:
        say(f"stage {stage}")
        sent.clear()
        answers.append((trained(rank, seeded(Stack), stage, plan, zero, more), list(sent)))
    say("1 bit")
    sent.clear()
    answers.append((one_bit.trained(rank, seeded(Stack), ONE), list(sent)))
    return answers


def test_fewer_bits():
    answers = run_processes(RANKS, trained_in_turn)
    one_bit.check([answer[-1][0] for answer in answers], ONE)
    for answer in answers:
        seen, sent = answer[-1]
        for state in seen[0][1].values():
            message = one_bit.nbytes(state["layout"])
            # to each other rank, up and down, in each step after the freeze
            assert sent.count(message) >= 2 * (RANKS - 1) * (one_bit.STEPS - one_bit.FREEZE)
    for number, (stage, plan, _, _) in enumerate(CASES):
        check_gradients([answer[number][0] for answer in answers], stage, plan)
        for answer in answers:
            (_, layouts), sent = answer[number]
            for layout in [layout for layout, _ in layouts.values() if compressible(layout)]:
                four = -(-layout.chunk // 32) * 16 + -(-layout.chunk // 512) * 16
                eight = -(-layout.chunk // 16) * 16 + -(-layout.chunk // 2048) * 16
                # to each other rank: up, and down, in each of two steps
                assert sent.count(four) >= 2 * (RANKS - 1) * (2 if stage == 1 else 1)
                assert (sent.count(eight) >= 2 * (RANKS - 1)) == (stage == 3)
                assert 2 * layout.chunk not in sent


def values_after(rank):
    """By stage, and by whether a message has several units: weights after two steps."""
    found = {}
    for stage, packed in itertools.product((1, 3), (0, 4 * BLOCK)):
        model, plan = seeded(lambda: Stack(5)), Plan(3, 2, clip=1.0)
        engine = start(model, adamw(model), config_of(stage, plan, **joined(stage, 1)))
        engine.sharded_model.packed_elements = packed
        engine.backward_pass.reducer._reductions._pack.limit = packed
        run_steps(engine, rank, range(2), 2)
        found[stage, packed] = {name: value.clone() for name, value in full_weights(engine).items()}
        engine.destroy()
    return found


def test_a_message_of_several_units():
    """gloo sums chunks in the order of ranks."""
    for found in run_processes(3, values_after, timeout=300.0):
        for stage in (1, 3):
            for name, value in found[stage, 0].items():
                assert torch.equal(value, found[stage, 4 * BLOCK][name]), f"{name}, stage {stage}"


# ---- gathers in two hops ----

NODES, NODE = 4, 2  # ranks, and those of a node


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


def apart_in_two_hops(rank):
    """Ranks that skip other blocks in each step: weights, and bytes sent to another node."""
    job, plan, answers = WAYS["each rank skips another block, by step"], Plan(NODES, steps=3), []
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


def test_in_two_hops():
    for (losses, without, most), (found, within, less) in run_processes(NODES, apart_in_two_hops):
        assert found == losses
        assert all(torch.equal(within[name], without[name]) for name in without)
        assert less < 0.85 * most  # reductions are what they were


# ---- the weights of a training, in a loop that is left ----


def leave(rank):
    """Losses and weights, with loops left by a break and by an error, and without loops."""
    found = {}
    for stage in (1, 3):
        for loops in (False, True):
            model = stack()
            engine = start(model, plain_sgd(model), config_of(stage))
            if loops:
                for _ in engine.iter_weights("300B", None, changed_only=True):
                    break
                with pytest.raises(ZeroDivisionError):
                    for _ in engine.iter_weights("300B", None):
                        1 / 0  # noqa: B018
            losses = run_steps(engine, rank, range(2))
            buckets = engine.iter_weights("300B", None, changed_only=True)
            weights = {name: value.clone() for bucket in buckets for name, value in bucket}
            found[stage, loops] = losses, weights
            engine.destroy()
    return found


def test_a_loop_may_be_left_early():
    for found in run_processes(2, leave, timeout=120):
        for stage in (1, 3):
            losses, weights = found[stage, True]
            want, of = found[stage, False]
            assert losses == want and weights.keys() == of.keys()
            assert all(torch.equal(value, of[name]) for name, value in weights.items())
