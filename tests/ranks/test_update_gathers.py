"""Gathers of updated parameters have one place in the order of a rank's collectives, however long
the updates take; and whoever needs one gets it, also where the others stand still.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

from hf_zero.distributed import collectives
from hf_zero.offload import update_gathers
from hf_zero.offload.sub_group_update import Update
from tests.helpers import offloads
from tests.helpers.cells import in_turn
from tests.helpers.models import ARCHITECTURES
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks

LLAMA = ARCHITECTURES["llama"]
STEPS = 3


def opened(model, stage, folder, **more):
    return offloads.opened(model, offload("optimizer on cpu", stage, folder, **more))


def train(engine, step, rank):
    engine.backward(engine(**LLAMA.batch(step, 0, rank)).loss)
    engine.step()


@pytest.fixture
def issued(monkeypatch):
    """Record the collectives that each rank issues on the axes of its engine, in order; updates are
    delayed, differently on each rank.
    """
    found: dict[int, list[str]] = defaultdict(list)
    start, run = collectives._Starting.__init__, Update.run
    pauses = random.Random(3)

    def noted(starting, watchdog, pending, *named):
        if len(pending.needs) > 1:
            found[dist.get_rank()].append(pending.what)
        start(starting, watchdog, pending, *named)

    def slow(update, *args):
        time.sleep(pauses.uniform(0.0, 0.02) * dist.get_rank())
        run(update, *args)

    monkeypatch.setattr(collectives._Starting, "__init__", noted)
    monkeypatch.setattr(Update, "run", slow)
    # a rank that comes late, as on a machine with much to do, is not taken for one that stays away
    monkeypatch.setattr(update_gathers, "GRACE_SECONDS", math.inf)
    return found


def _steps(rank, models, stage, folder, more):
    engine = opened(models[rank], stage, folder, **more)
    for step in range(STEPS):
        train(engine, step, rank)
    engine.destroy()


@in_turn("stage, ranks, more", [(1, 3, {}), (2, 2, {"update_in_backward": True})])
def test_all_ranks_issue_their_collectives_in_one_order(stage, ranks, more, issued, tmp_path):
    issued.clear()
    run_ranks(ranks, _steps, [LLAMA.build() for _ in range(ranks)], stage, tmp_path, more)
    assert len(issued) == ranks
    assert all(order == issued[0] for order in issued.values())
    gathers = [place for place, what in enumerate(issued[0]) if " of updated " in what]
    assert len(gathers) >= 3 * STEPS


def _one_reads(rank, models, folder, how, gate):
    engine = opened(models[rank], 2, folder)
    train(engine, 0, rank)
    assert set(engine.updater.pending) == {unit for unit in engine.units if unit.trainable}
    dist.barrier()
    gate.set()
    if rank == 0 and how == "a forward":
        with torch.no_grad():
            engine(**LLAMA.batch(5, 0, 0))
    elif rank == 0:
        engine.module.lm_head.weight.sum()
    dist.barrier()
    left = len(engine.updater.pending)
    train(engine, 1, rank)
    weights = {
        name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()
    }
    engine.destroy()
    return left, weights


@in_turn("how", ["a forward", "a parameter"])
def test_one_rank_reads_while_the_others_stand_in_a_barrier(how, gate, tmp_path):
    """``step`` returns before any gather; rank 0 continues alone."""
    gate.clear()
    seen = run_ranks(3, _one_reads, [LLAMA.build() for _ in range(3)], tmp_path, how, gate)
    assert all(left for left, _ in seen[1:]), "the others have not asked for their parameters"
    for _, weights in seen[1:]:
        offloads.same(weights, seen[0][1], exact=True)


def _nobody_asks(rank, models, folder):
    engine = opened(models[rank], 2, folder)
    train(engine, 0, rank)
    for future, _ in engine.updater._pending.values():
        future.result()
    dist.barrier()
    time.sleep(3 * update_gathers.POLL_SECONDS)
    sent = [gather.issued.done() for _, gather in engine.updater._pending.values()]
    dist.barrier()  # who ends needs them, and says so
    engine.destroy()
    return sent


def test_nothing_leaves_that_no_rank_needs(tmp_path, monkeypatch):
    """The thread that trains may be about to issue something else."""
    monkeypatch.setattr(update_gathers, "GRACE_SECONDS", 0.0)
    for sent in run_ranks(2, _nobody_asks, [LLAMA.build() for _ in range(2)], tmp_path):
        assert sent and not any(sent)


def _breaks(rank, models, folder):
    engine = opened(models[rank], 2, folder)
    train(engine, 0, rank)
    with pytest.raises(OSError, match="Input/output error"):
        engine(**LLAMA.batch(1, 0, rank))
    with pytest.raises(OSError, match="Input/output error"):  # nor what comes after in the order
        engine.module.lm_head.weight.sum()
    if len(models) > 1:
        engine.mesh.shard.all_reduce(torch.zeros(1), "something else").wait()
    with pytest.raises(OSError, match="Input/output error"):
        engine.destroy()


@in_turn("ranks", [1, 2])
def test_an_update_that_fails_is_raised_and_holds_up_nothing_else(ranks, tmp_path, monkeypatch):
    def broken(update, *args):
        raise OSError(5, "Input/output error", "/disk")

    monkeypatch.setattr(Update, "run", broken)
    run_ranks(ranks, _breaks, [LLAMA.build() for _ in range(ranks)], tmp_path)


def test_the_thread_ends_with_its_engine(tmp_path):
    run_ranks(2, _steps, [LLAMA.build() for _ in range(2)], 2, tmp_path, {})
    assert not [each for each in threading.enumerate() if "update gathers" in each.name]
