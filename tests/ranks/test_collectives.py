"""Communication: the number, order and bytes of collectives per step are those of the stage
table.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_each_rank, on_ranks, squared
from tests.helpers.training import At, Plan, adamw
from tests.helpers.ways import WAYS

RANKS, STEPS = 4, 4
PARAMETERS = 22  # of a Stack with three blocks
# of a Stack: the root holds the entrance and the head
UNITS = ["(root)", "blocks.0", "blocks.1", "blocks.2"]


def step(engine, rank, number, plan):
    for micro in range(plan.accumulation):
        engine.backward(squared(engine, At(number, micro, rank), plan.dtype))
        engine.step()


def last_step(stage: int, plan: Plan, depth: int = 3):
    """The log of the last of several steps, [(operation, key, bytes)], and the bytes of each
    unit's flats.
    """

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, plan))
        for number in range(STEPS):
            engine.mesh.stats.keep_log = number == STEPS - 1
            engine.mesh.stats.log.clear()
            step(engine, rank, number, plan)
        padded = {flat.key: flat.layout.padded for flat in engine.flats}
        return list(engine.mesh.stats.log), padded

    answers = on_ranks(RANKS, run, build=lambda: seeded(lambda: Stack(depth)))
    assert all(answer == answers[0] for answer in answers), "ranks issued different collectives"
    return answers[0]


def counted(log) -> Counter:
    return Counter(
        operation for operation, key, _ in log if key not in ("gradient norm", "used parameters")
    )


@pytest.mark.turns
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_numbers_and_bytes(stage, accumulation, precision):
    plan = Plan(accumulation=accumulation, precision=precision)
    log, padded = last_step(stage, plan)
    units, size = len(UNITS), plan.dtype.itemsize
    whole = sum(padded.values()) * size
    # The root and the last block stay gathered from forward to backward.
    gathers = {0: 0, 1: units, 2: units, 3: accumulation * (2 * units - 2)}[stage]
    reductions = units * (accumulation if stage >= 2 else 1)
    reduction = "all_reduce" if stage == 0 else "reduce_scatter"
    assert counted(log) == Counter({"all_gather": gathers, reduction: reductions}) + Counter()
    # One small sum a step: the norm where it is sharded, and with it, a digit each, which
    # parameters have a gradient. five ranks can be told apart in 22 digits of a number that is
    # exact up to 2^53
    words = -(-PARAMETERS // 22) * 8
    sums = [(key, nbytes) for _, key, nbytes in log if key in ("gradient norm", "used parameters")]
    assert sums == [("used parameters", words) if stage == 0 else ("gradient norm", 8 + words)]

    moved = Counter()
    for operation, key, nbytes in log:
        if key == "used parameters":
            continue
        moved[operation] += nbytes
    assert moved[reduction] == whole * (accumulation if stage >= 2 else 1)
    if stage in (1, 2):
        assert moved["all_gather"] == whole
    if stage == 3:
        kept = sum(
            n * size for key, n in padded.items() if key.startswith(("|", "(root)", "blocks.2"))
        )
        assert moved["all_gather"] == accumulation * (2 * whole - kept)


def test_order_at_stage_3():
    """Forward in order, backward in reverse without the unit that is still there; reductions run
    between those gathers.
    """
    log, _ = last_step(3, Plan(), depth=6)
    gathers = [key for operation, key, _ in log if operation == "all_gather"]
    assert gathers == [
        "(root)",
        *(f"blocks.{i}" for i in range(6)),
        *(f"blocks.{i}" for i in (4, 3, 2, 1, 0)),
    ]
    reductions = [key.split("|")[0] for operation, key, _ in log if operation == "reduce_scatter"]
    assert reductions[:6] == [f"blocks.{i}" for i in (5, 4, 3, 2, 1, 0)] and len(reductions) == 7
    operations = [operation for operation, _, _ in log]
    assert "all_gather" in operations[operations.index("reduce_scatter") :]


def test_one_rank_sends_nothing():
    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        for number in range(2):
            step(engine, rank, number, Plan())
        return dict(engine.mesh.stats.counts)

    assert on_ranks(1, run) == [{}]


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(2)
def test_recorded_steps_need_no_agreement(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    gathers = engine.mesh.consensus.gathers
    asked, settle = [], gathers.agree

    def counting(*args, **kwargs):
        asked.append(args)
        return settle(*args, **kwargs)

    gathers.agree = counting
    seen = []
    for number in range(4):
        step(engine, rank, number, Plan())
        seen.append(len(asked))
    assert seen[-1] == seen[-3], f"agreements after each step: {seen}"
    assert (seen[0] > 0) == (stage == 3)


def test_gathers_run_ahead_and_few_units_are_whole():
    """In a recorded step, the next block's gather is in flight while a block computes, and
    completed blocks are released.
    """

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        stats, whole = engine.mesh.stats, []

        def seen(index):
            def hook(module, args):
                stats.log.append(("compute", f"blocks.{index}", 0))
                whole.append(sum(flat.full.untyped_storage().size() > 0 for flat in engine.flats))

            return hook

        for index, block in enumerate(model.blocks):
            block.norm.register_forward_pre_hook(seen(index))
        for number in range(3):
            stats.keep_log = True
            stats.log.clear()
            step(engine, rank, number, Plan())
        order = [
            (operation, key)
            for operation, key, _ in stats.log
            if operation in ("all_gather", "compute")
        ]
        for index in (0, 1):
            assert order.index(("all_gather", f"blocks.{index + 1}")) < order.index(
                ("compute", f"blocks.{index}")
            )
        return whole

    for whole in on_ranks(2, run, build=lambda: seeded(lambda: Stack(depth=8))):
        assert max(whole) <= 4, f"flats that were whole at once: {whole}"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_costs_no_further_gather(checkpointing):
    way = WAYS["non-reentrant checkpoint around each block"]

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        for number in range(STEPS):
            engine.mesh.stats.keep_log = number == STEPS - 1
            step(engine, rank, number, Plan())
        return counted(engine.mesh.stats.log)["all_gather"]

    build = way.build if checkpointing else None
    answers = on_ranks(2, run, **({"build": build} if build else {}))
    assert answers == [6, 6]


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_gathers_each_unit_once(stage):
    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        engine.eval()
        for number in range(3):
            engine.mesh.stats.counts.clear()
            with torch.no_grad():
                squared(engine, At(number, 0, rank))
        return dict(engine.mesh.stats.counts)

    assert on_ranks(2, run) == [{"all_gather": 4} if stage == 3 else {}] * 2
