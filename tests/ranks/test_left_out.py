"""Ranks that leave out blocks, each its own in every step: numbers are the oracle's, with zeros
for what was left out.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, engine_opener, start, train_on_threads
from tests.helpers.left_out import LeftOut, at_random, first_used
from tests.helpers.models import features, floats, seeded
from tests.helpers.plans import APART
from tests.helpers.stacks import on_ranks
from tests.helpers.training import Plan, adamw


def check(job, ranks=2, accumulation=1, stage=3, steps=3, **more):
    plan = Plan(ranks=ranks, steps=steps, accumulation=accumulation)
    trace = train_on_threads(job, plan, engine_opener(stage, **more))
    oracle.compare(trace, oracle.run(job, plan), weight_floor=oracle.ROUNDING)


COMPILED = {"compile": {"blocks": True, "backend": "eager"}}


@in_turn(
    "ranks, accumulation, checkpoints, more",
    [
        (2, 2, True, {}),
        (3, 1, False, {}),
        (4, 1, None, {"replicate_size": 2}),
        (2, 1, None, COMPILED),
    ],
)
def test_each_rank_leaves_out_its_own_at_random(ranks, accumulation, checkpoints, more):
    check(LeftOut(8, at_random(8, 0.4), checkpoints), ranks, accumulation, steps=2, **more)


@in_turn("config", [{}, {"replicate_size": 2}])
def test_blocks_that_the_first_pass_leaves_out_are_used_later(config):
    """Whatever the length of the shard axis is: 1 on several ranks, too."""
    check(LeftOut(6, first_used(1, 2, 3)), **config)


class Explained(LeftOut):
    """The gradient of the input is asked of each loss in ``when`` before its backward."""

    def __init__(self, choose, when):
        super().__init__(6, choose)
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


@in_turn(
    "choose, when, stage, ranks",
    [
        (lambda at: set(), lambda at: True, 1, 2),
        (first_used(1, 2, 3), lambda at: at.micro == 0, 3, 2),
        (at_random(6, 0.4), lambda at: at.micro == 1, 3, 3),
    ],
)
def test_gradients_asked_of_the_graph_of_a_loss(choose, when, stage, ranks):
    """They come in the order in which units are reduced, learned from backwards that reduce."""
    zero = {"stage": stage, **APART}
    check(Explained(choose, when), ranks, 2, stage, zero_optimization=zero)


class Leaving(nn.Module):
    """A block whose unit stays whole as long as a result lives that no hook sees."""

    def __init__(self, left):
        super().__init__()
        self.layer, self.left = nn.Linear(8, 8), left

    def forward(self, x):
        out = torch.relu(self.layer(x))
        self.left.append(out * out)
        return out


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.left: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(Leaving(self.left) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean() + sum(each.mean() for each in self.left)
        self.left.clear()
        return loss


def test_a_graph_that_one_rank_still_holds_at_a_step_makes_it_join_no_gather():
    plain, wanted = seeded(Chain), []
    optimizer = adamw(plain)
    for step in range(4):
        each = [plain(floats(step, 0, rank, 3, 8)) for rank in range(2)]
        wanted.append([float(loss.detach()) for loss in each])
        optimizer.zero_grad()
        (sum(each) / 2).backward()
        optimizer.step()

    def run(rank, model):
        engine, held = start(model, adamw(model), config_of(3)), None
        for step in range(4):
            x = floats(step, 0, rank, 3, 8)
            if step == 2:
                held = engine(x)
                if rank == 1:
                    held = None
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            assert float(loss.detach()) == pytest.approx(wanted[step][rank], rel=1e-5)
        issued = engine.mesh.shard.gathers.sequence_number
        del held
        engine.destroy()
        return issued

    first, second = on_ranks(2, run, build=lambda: seeded(Chain))
    assert first == second, "ranks have issued as many gathers"
