"""The harness itself: results in order, failures named, hangs ended, the next run undisturbed; the
comparison with the oracle accepts data parallelism that is right and rejects each known fault.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import _ops, nn

from tests.helpers import oracle
from tests.helpers import ranks as harness
from tests.helpers.engines import train_on_threads
from tests.helpers.hand import FAULTS, HandMade
from tests.helpers.models import ARCHITECTURES, seeded
from tests.helpers.ranks import RankFailed, RanksHung, run_ranks
from tests.helpers.training import ArchitectureJob, Plan, adamw, plain_sgd


def total(rank, offset):
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return float(value)


def test_results_come_in_rank_order_and_collectives_work():
    assert run_ranks(4, total, 1) == [10.0] * 4
    assert run_ranks(3, lambda rank: rank * rank) == [0, 1, 4]
    assert run_ranks(1, total, 5) == [5.0]


def test_a_failure_names_the_rank_and_stops_the_others():
    def fails(rank):
        if rank == 2:
            raise KeyError("lost key")
        total(rank, 0)

    with pytest.raises(RankFailed, match="rank 2 of 4 raised") as caught:
        run_ranks(4, fails, timeout=60)
    assert isinstance(caught.value.__cause__, KeyError)
    assert run_ranks(4, total, 0) == [6.0] * 4


def test_a_missing_collective_is_shown_not_waited_for(monkeypatch):
    monkeypatch.setattr(harness, "LINGER", 0.5)

    come = threading.Barrier(3)

    def waits(rank):
        come.wait(60)
        total(rank, 0)

    def hangs(rank):
        come.wait(60) if rank == 1 else waits(rank)

    with pytest.raises(RanksHung) as caught:
        run_ranks(3, hangs, timeout=60)
    assert "rank 1: returned" in str(caught.value)
    assert "rank 0: still running" in str(caught.value)
    assert "in waits" in str(caught.value)
    assert run_ranks(3, total, 0) == [3.0] * 3


def test_a_rank_that_waits_on_the_store_is_abandoned(monkeypatch):
    monkeypatch.setattr(harness, "LINGER", 0.3)

    stores: list[dist.Store] = []

    def waits(rank):
        if rank == 0:
            stores.append(dist.distributed_c10d._get_default_store())
            stores[0].get("late")

    with pytest.raises(RanksHung, match="rank 0: still running"):
        run_ranks(2, waits, timeout=60)
    assert run_ranks(2, total, 0) == [1.0] * 2
    stores[0].set("late", "")  # its thread ends


def test_no_group_is_left_behind():
    run_ranks(2, total, 0)
    assert not dist.is_initialized()


def test_collectives_are_asynchronous():
    """Each rank starts two and waits for them afterwards, in another order than the other rank:
    nobody blocks at the start.
    """

    def run(rank):
        first, second = torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
        for work in works if rank else reversed(works):
            work.wait()
        return float(first), float(second)

    assert run_ranks(2, run) == [(3.0, 21.0)] * 2


def test_groups_do_not_wait_for_each_other():
    """Ranks may interleave two groups as they like, as on a real backend."""

    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        values = [torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])]
        works = [
            dist.all_reduce(values[i], group=groups[i], async_op=True)
            for i in ((0, 1) if rank else (1, 0))
        ]
        for work in works:
            work.wait()
        return [float(value) for value in values]

    assert run_ranks(2, run) == [[3.0, 21.0]] * 2


@pytest.mark.parametrize("size", [3, 4])
def test_a_mismatch_is_an_error(size):
    def run(rank):
        if rank == 0:
            dist.all_reduce(torch.zeros(3))
        elif size == 4:
            dist.all_reduce(torch.zeros(size))
        else:
            dist.broadcast(torch.zeros(size), 0)

    with pytest.raises(RankFailed, match="ranks meet in different collectives"):
        run_ranks(2, run, timeout=60)


def test_an_operator_is_made_once(monkeypatch):
    """Two ranks that first use it at the same time get one object: torch's dispatcher keeps a
    pointer to it, not a reference.
    """
    made = []

    def slow(make):
        def of_one(*args):
            made.append(args)
            time.sleep(0.05)  # for the other rank to come
            return make(*args)

        return of_one

    for name in ("OpOverloadPacket", "OpOverload"):
        monkeypatch.setattr(_ops, name, slow(getattr(_ops, name)))
    with torch.library._scoped_library("hf_zero_tests", "FRAGMENT") as library:
        library.define("made_once(Tensor x) -> Tensor")
        come = threading.Barrier(2)

        def first_use(rank):
            come.wait(60)
            return torch.ops.hf_zero_tests.made_once.default

        first, second = run_ranks(2, first_use)
    assert first is second and len(made) == 2


PLAN = Plan(ranks=2, steps=3, accumulation=2, clip=0.5)


class WithUnused(ArchitectureJob):
    """BERT with a parameter that no forward uses."""

    def build(self):
        model = super().build()
        model.unused = seeded(lambda: nn.Linear(4, 4))
        return model


def job(make_optimizer=adamw):
    made = WithUnused(ARCHITECTURES["bert"], make_optimizer)
    made.name = f"bert with an unused layer, {make_optimizer.__name__}"
    return made


@pytest.mark.parametrize(
    "make_optimizer, floor", [(adamw, oracle.ADAM_ROUNDING), (plain_sgd, oracle.ROUNDING)]
)
def test_the_right_loop_is_accepted(make_optimizer, floor):
    got = train_on_threads(job(make_optimizer), PLAN, HandMade)
    oracle.compare(got, oracle.kept(job(make_optimizer), PLAN), weight_floor=floor)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught(fault):
    with pytest.raises(AssertionError, match=r"gradient|weights|differs between") as caught:
        oracle.compare(
            train_on_threads(job(), PLAN, lambda *a: HandMade(*a, fault)), oracle.kept(job(), PLAN)
        )
    if fault == "a tied weight counted twice":
        assert "bert.embeddings.word_embeddings.weight" in str(caught.value)


@pytest.mark.turns
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loop_in_16_bits_passes_its_own_criterion_and_a_coarser_one_does_not(name, precision):
    plan = Plan(ranks=2, steps=5, accumulation=1, precision=precision)
    exact = oracle.kept(ArchitectureJob(ARCHITECTURES[name]), Plan(ranks=2, steps=5))
    mixed = oracle.kept(ArchitectureJob(ARCHITECTURES[name]), plan)
    oracle.compare_mixed(mixed, mixed, exact, plan.dtype)
    coarse = oracle.run(ArchitectureJob(ARCHITECTURES[name]), plan)
    for grads in coarse.grads:
        for grad in grads.values():
            grad += 0.1 * grad.abs()
    with pytest.raises(AssertionError, match="gradients: error"):
        oracle.compare_mixed(coarse, mixed, exact, plan.dtype)
