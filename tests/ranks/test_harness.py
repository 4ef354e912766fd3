"""The harness itself: results in order, failures named, hangs ended, the next run undisturbed; the
comparison with the oracle accepts data parallelism that is right and rejects each known fault.
"""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import oracle
from tests.helpers import ranks as harness
from tests.helpers.cells import in_turn
from tests.helpers.engines import train_on_threads
from tests.helpers.models import Stack
from tests.helpers.oracle import total_norm
from tests.helpers.ranks import RankFailed, RanksHung, run_ranks
from tests.helpers.training import Plan, Session, Way, adamw, plain_sgd
from tests.ranks.cases import values_of


def total(rank, offset):
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return float(value)


def test_a_failure_names_the_rank_and_stops_the_others():
    def fails(rank):
        if rank == 2:
            raise KeyError("lost key")
        total(rank, 0)

    with pytest.raises(RankFailed, match="rank 2 of 4 raised") as caught:
        run_ranks(4, fails, timeout=60)
    assert isinstance(caught.value.__cause__, KeyError)
    assert run_ranks(4, total, 0) == [6.0] * 4


def test_a_rank_that_exits_has_failed():
    with pytest.raises(RankFailed, match="rank 1 of 2 raised"):
        run_ranks(2, lambda rank: sys.exit(0) if rank else None, timeout=60)


def test_a_missing_collective_is_shown_not_waited_for(monkeypatch):
    monkeypatch.setattr(harness, "LINGER", 0.5)
    come = threading.Barrier(3)

    def waits(rank):
        come.wait(60)
        total(rank, 0)

    with pytest.raises(RanksHung) as caught:
        run_ranks(3, lambda rank: come.wait(60) if rank == 1 else waits(rank), timeout=60)
    for told in ("rank 1: returned", "rank 0: still running", "in waits"):
        assert told in str(caught.value)
    assert run_ranks(3, total, 0) == [3.0] * 3


@in_turn("size", [3, 4])
def test_a_mismatch_is_an_error(size):
    def run(rank):
        if rank == 0 or size == 4:
            dist.all_reduce(torch.zeros(size if rank else 3))
        else:
            dist.broadcast(torch.zeros(size), 0)

    with pytest.raises(RankFailed, match="ranks meet in different collectives"):
        run_ranks(2, run, timeout=60)


FAULTS = (
    "sum instead of mean",
    "no division by accumulation",
    "first micro-batch lost",
    "one parameter not reduced",
    "a gradient counted twice",
    "norm of one rank",
    "clipped to another norm",
    "unused updated by the optimizer",
)


class HandMade(Session):
    """Gradients all-reduced after a window, then a plain step; right, or with one fault."""

    def __init__(self, model, optimizer, plan, fault=""):
        self.module, self.optimizer, self.plan, self.fault = model, optimizer, plan, fault
        self.dtype, self.memory, self.micro, self.last_norm = plan.dtype, {}, 0, 0.0
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss):
        whole = self.fault == "no division by accumulation"
        (loss / (1 if whole else self.plan.accumulation)).backward()
        self.micro += 1
        if self.fault == "first micro-batch lost" and self.micro == 1:
            self.optimizer.zero_grad()

    def grads(self):
        for index, (_, p) in enumerate(self.named):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if self.fault == "one parameter not reduced" and index == 1:
                continue
            dist.all_reduce(p.grad)
            if self.fault != "sum instead of mean":
                p.grad /= self.plan.ranks
            if self.fault == "a gradient counted twice" and index == 0:
                p.grad *= 2
        return {name: p.grad.clone() for name, p in self.named}

    def step(self):
        if self.micro < self.plan.accumulation:
            return
        norm = total_norm({name: p.grad for name, p in self.named})
        self.last_norm = norm / (self.plan.ranks**0.5 if self.fault == "norm of one rank" else 1)
        limit = self.plan.clip * (0.9 if self.fault == "clipped to another norm" else 1.0)
        nn.utils.clip_grad_norm_([p for _, p in self.named], limit)
        for _, p in self.named:
            if self.fault != "unused updated by the optimizer" and not p.grad.any():
                p.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.micro = 0

    def norm(self):
        return self.last_norm

    def weights(self):
        return values_of(self.module)

    def close(self):
        self.optimizer.zero_grad()


PLAN = Plan(ranks=2, steps=2, accumulation=2, clip=0.5)


class WithUnused(Stack):
    """Has a parameter that no forward uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)


def job(make_optimizer=adamw):
    name = f"stack with an unused layer, {make_optimizer.__name__}"
    return Way(name, WithUnused, make_optimizer=make_optimizer)


@in_turn("optimizer, floor", [(adamw, oracle.ADAM_ROUNDING), (plain_sgd, oracle.ROUNDING)])
def test_the_right_loop_is_accepted(optimizer, floor):
    got = train_on_threads(job(optimizer), PLAN, HandMade)
    oracle.compare(got, oracle.kept(job(optimizer), PLAN), weight_floor=floor)


@in_turn("fault", FAULTS)
def test_each_fault_is_caught(fault):
    with pytest.raises(AssertionError, match=r"gradient|weights|differs between") as caught:
        got = train_on_threads(job(), PLAN, lambda *given: HandMade(*given, fault))
        oracle.compare(got, oracle.kept(job(), PLAN))
    if fault == "a gradient counted twice":
        assert "enter.weight" in str(caught.value)


@in_turn("precision", ["bf16", "fp16"])
def test_a_loop_in_16_bits_passes_its_own_criterion_and_a_coarser_one_does_not(precision):
    own, plan = job(), Plan(2, 3, precision=precision)
    exact, mixed = oracle.kept(own, Plan(2, 3)), oracle.kept(own, plan)
    oracle.compare_mixed(mixed, mixed, exact, plan.dtype)
    coarse = oracle.run(own, plan)
    for grads in coarse.grads:
        for grad in grads.values():
            grad += 0.1 * grad.abs()
    with pytest.raises(AssertionError, match="gradients: error"):
        oracle.compare_mixed(coarse, mixed, exact, plan.dtype)
