"""Ranks that leave out blocks, each its own in every step: numbers are the oracle's, with zeros
for what was left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_zero
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import config_of, engine_opener, full_weights, start, train_on_threads
from tests.helpers.left_out import Dropping, LeftOut, at_random, first_used, on_one
from tests.helpers.models import Stack, features, floats, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_ranks, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd

COMPILED = {"blocks": True, "backend": "aot_eager"}


def check(job, ranks, accumulation, stage, steps=3, **more):
    plan = Plan(ranks=ranks, steps=steps, accumulation=accumulation)
    trace = train_on_threads(job, plan, engine_opener(stage, **more))
    oracle.compare(trace, oracle.run(job, plan), weight_floor=oracle.ROUNDING)


ENDS = [(13, 12, 11, 10, 9), (10,), (0, 1, 2, 3, 4, 5)]
ONE = [
    (rank, blocks, since, stage)
    for rank in (0, 1)
    for blocks in ENDS
    for since in (0, 2)
    for stage in (0, 1, 2, 3)
]


@pytest.mark.parametrize(
    "rank, blocks, since, stage",
    fast(
        ONE, lambda rank, blocks, since, stage: (rank, since) == ((0, 0) if stage == 3 else (1, 2))
    ),
)
def test_one_rank_leaves_out_blocks(rank, blocks, since, stage):
    check(LeftOut(14, on_one(rank, *blocks, since=since)), 2, 1, stage)


@pytest.mark.parametrize(
    "ranks, accumulation, checkpoints", [(2, 3, None), (3, 1, False), (4, 1, True)]
)
def test_each_rank_leaves_out_its_own_at_random(ranks, accumulation, checkpoints):
    check(LeftOut(20, at_random(20, 0.3), checkpoints), ranks, accumulation, 3)


def test_over_replicas():
    check(LeftOut(12, at_random(12, 0.5)), 4, 1, 3, replicate_size=2)


SHARD_AXES = {
    "2 of 2": (2, {}),
    "1 of 2": (2, {"replicate_size": 2}),
    "1 of 2, MiCS": (2, {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}),
    "2 of 4": (4, {"replicate_size": 2}),
}


@pytest.mark.parametrize("axis", SHARD_AXES)
def test_blocks_that_the_first_pass_leaves_out_are_used_later(axis):
    """Whatever the length of the shard axis is: 1 on several ranks, too."""
    ranks, config = SHARD_AXES[axis]
    check(LeftOut(6, first_used(1, 2, 3)), ranks, 1, 3, timeout=60, **config)


def test_compiled_blocks():
    check(LeftOut(10, at_random(10, 0.4)), 2, 1, 3, steps=2, compile=COMPILED)


class _Explained(LeftOut):
    """The gradient of the input is asked of the graph of each loss in ``when`` before its backward:
    a backward that brings no gradient to parameters.
    """

    def __init__(self, depth, choose, when):
        super().__init__(depth, choose)
        self.when = when

    def loss(self, net, at):
        out = self.choose(at)
        net.module.chosen = [index for index in range(self.depth) if index not in out]
        x = features(at.step, at.micro, at.rank).to(net.dtype).requires_grad_()
        loss = net(x).float().pow(2).mean()
        slope = torch.zeros(())
        if self.when(at):
            slope = torch.autograd.grad(loss, x, retain_graph=True)[0].pow(2).sum()
        return loss + slope  # whose value is compared with the oracle's


WHEN: dict[str, Callable[[At], bool]] = {
    "always": lambda at: True,
    "in the first micro-batch": lambda at: at.micro == 0,
    "in the last micro-batch": lambda at: at.micro == 1,
    "from the second step on": lambda at: at.step > 0,
    "in the first step": lambda at: at.step == 0,
}
CHOICES = {
    "all used": lambda at: set(),
    "others on each rank": at_random(6, 0.4),
    "none in the first step": first_used(1, 2, 3),
}


@pytest.mark.parametrize(
    ("when", "choose", "stage", "ranks"),
    fast(
        list(itertools.product(WHEN, CHOICES, (0, 1, 2, 3), (2, 3))),
        lambda when, choose, stage, ranks: (
            ranks == 2
            and stage == (3 if (list(WHEN).index(when) + list(CHOICES).index(choose)) % 2 else 1)
        ),
    ),
)
def test_gradients_asked_of_the_graph_of_a_loss(when, choose, stage, ranks):
    """They come in the order in which units are reduced, learned from backwards that reduce."""
    apart = {"stage3_module_granularity_threshold": 0, "stage3_param_persistence_threshold": 0}
    job = _Explained(6, CHOICES[choose], WHEN[when])
    check(job, ranks, 2, stage, timeout=60, zero_optimization={"stage": stage, **apart})


@pytest.mark.parametrize("place", ["before the forward", "before the backward", "before the step"])
def test_a_forward_that_one_rank_adds_where_all_is_gathered(place):
    """It concerns no other rank, and the next backward is the same on all."""
    models = [seeded(Stack) for _ in range(2)]
    apart = {"stage3_module_granularity_threshold": 0, "stage3_param_persistence_threshold": 0}

    def run(rank):
        model = models[rank]
        config = {**config_of(3), "zero_optimization": {"stage": 3, **apart}}
        engine = start(model, plain_sgd(model), config)
        for step in range(3):
            for at in ("before the forward", "before the backward", "before the step"):
                if at == place:
                    with hf_zero.GatheredParameters(list(model.parameters())):
                        if rank == 0 and step:
                            squared(engine, At(9, 0, 0))
                if at == "before the forward":
                    loss = squared(engine, At(step, 0, rank))
                elif at == "before the backward":
                    engine.backward(loss)
            engine.step()
        return full_weights(engine)

    want = by_hand(plain_sgd, [[(1.0, 0)]] * 3, 2)[0]
    for weights in run_ranks(2, run, timeout=60):
        oracle.compare_tensors("weights", weights, want)


class _Masking(Dropping):
    """A stack with an optional keyword, for which its last block is there."""

    def forward(self, x, mask=None):
        self.chosen = range(len(self.blocks) - (mask is None))
        return super().forward(x if mask is None else x * mask)


class _MaskOnSomeRanks(LeftOut):
    """A tensor for the keyword on one rank, and for the others None or, ``absent``, nothing;
    from ``since`` on, before on all.
    """

    def __init__(self, absent, since):
        super().__init__(3, lambda at: ())
        self.absent, self.since = absent, since

    def build(self):
        return seeded(lambda: _Masking(self.depth, 8))

    def loss(self, net, at):
        mask = (
            torch.full((1,), 0.5, dtype=net.dtype) if at.rank == 0 or at.step < self.since else None
        )
        given = {} if mask is None and self.absent else {"mask": mask}
        return (
            net(features(at.step, at.micro, at.rank).to(net.dtype), **given).float().pow(2).mean()
        )


@pytest.mark.parametrize("absent, since", [(False, 0), (True, 0), (True, 2)])
def test_an_optional_keyword_is_given_on_one_rank_only(absent, since):
    plan = Plan(ranks=2, steps=4, accumulation=1)
    job = _MaskOnSomeRanks(absent, since)
    oracle.compare(
        train_on_threads(job, plan, engine_opener(3)),
        oracle.run(job, plan),
        weight_floor=oracle.ROUNDING,
    )


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_at_random_everywhere(ranks, accumulation, checkpoints, stage):
    check(LeftOut(40, at_random(40, 0.3), checkpoints), ranks, accumulation, stage, steps=6)


class _Leaving(nn.Module):
    """A block that leaves a result where no hook sees it, so that its unit stays whole as long
    as that lives.
    """

    def __init__(self, left):
        super().__init__()
        self.layer, self.left = nn.Linear(8, 8), left

    def forward(self, x):
        out = torch.relu(self.layer(x))
        self.left.append(out * out)
        return out


class _Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.left: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(_Leaving(self.left) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean() + sum(each.mean() for each in self.left)
        self.left.clear()
        return loss


def test_a_graph_that_one_rank_still_holds_at_a_step_makes_it_join_no_gather():

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        held, losses = None, []
        for step in range(4):
            x = floats(step, 0, rank, 3, 8)
            if step == 2:
                held = engine(x)
                if rank == 1:
                    held = None
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        issued = engine.mesh.shard.gathers.sequence_number
        del held
        engine.destroy()
        return issued, losses

    first, second = on_ranks(2, run, build=lambda: seeded(_Chain))
    assert first[0] == second[0], "ranks have issued as many gathers"
    plain = seeded(_Chain)
    optimizer = adamw(plain)
    for step in range(4):
        each = [plain(floats(step, 0, rank, 3, 8)) for rank in range(2)]
        for got, want in zip((first, second), each):
            assert got[1][step] == pytest.approx(float(want), rel=1e-5)
        optimizer.zero_grad()
        (sum(each) / 2).backward()
        optimizer.step()
