"""Progressive layer dropping on ranks, against the same blocks left out by hand in a plain loop."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import (
    STAGES,
    OnEngine,
    config_of,
    engine_opener,
    start,
    train_on_threads,
)
from tests.helpers.layer_drop import DEPTH, FAMILIES, LayerDropJob, left_out, probabilities
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import offload
from tests.helpers.training import At, Plan

COMPILED = {"blocks": True, "backend": "aot_eager"}
# each block a unit of its own, none of whose parameters stays whole
APART = {"stage3_module_granularity_threshold": 0, "stage3_param_persistence_threshold": 0}
# What is kept is scaled up, which is up to a factor of 2.5 a block for rounding, too.
TOLERANCE = 1e-4


def check(job: LayerDropJob, plan: Plan, stage: int, **more: Any) -> None:
    got = train_on_threads(job, plan, engine_opener(stage, **job.keys, **more))
    want = oracle.run(job, plan)
    assert any(map(any, job.left_out.values())), "the plain model has left nothing out"
    oracle.compare(got, want, TOLERANCE, oracle.ADAM_ROUNDING)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_as_by_hand(stage, ranks, accumulation):
    check(
        LayerDropJob("stack"),
        Plan(ranks, 4, accumulation, clip=0.5),
        stage,
        zero_optimization={"stage": stage, **APART},
    )


EVERYWHERE = list(itertools.product(FAMILIES, STAGES, (1, 2, 4), (1, 2)))


@pytest.mark.parametrize(
    "family, stage, ranks, accumulation",
    fast(
        EVERYWHERE,
        lambda family, stage, ranks, accumulation: (
            family != "stack"
            and (stage, ranks, accumulation)
            == ((3, 1, 1) if family in ("vit", "roberta") else (3, 2, 2))
        ),
    ),
)
def test_families(family, stage, ranks, accumulation):
    check(LayerDropJob(family), Plan(ranks, 3, accumulation), stage)


@pytest.mark.parametrize("family", fast(["stack", "t5"], lambda family: family == "stack"))
def test_each_rank_its_own(family):
    job = LayerDropJob(family, per_rank=True)
    check(job, Plan(2, 4, 2), 3, zero_optimization={"stage": 3, **APART})
    assert any(job.left_out[step, 0, 0] != job.left_out[step, 0, 1] for step in range(4))


@pytest.mark.parametrize("way, stage, more", [
    ("optimizer on cpu", 2, {"update_in_backward": True}),
    ("optimizer on cpu", 3, {}),
    ("all in files", 3, {"update_in_backward": True}),
])  # fmt: skip
def test_offloaded(way, stage, more, tmp_path):
    zero = {**offload(way, stage, tmp_path, **more), **APART}
    check(LayerDropJob("stack"), Plan(2, 4, 2), stage, zero_optimization=zero)


@pytest.mark.parametrize("more", [
    {"activation_checkpointing": {"blocks": True}},
    {"activation_checkpointing": {"blocks": True}, "compile": COMPILED},
    {"compile": COMPILED},
    {"bf16": {"enabled": False}, "replicate_size": 2},
], ids=str)  # fmt: skip
def test_with_what_else_is_on_blocks(more):
    check(LayerDropJob("gpt2"), Plan(2, 2), 3, **more)


class CheckpointsItself(LayerDropJob):
    """A model of transformers with its own gradient checkpointing."""

    def build(self) -> nn.Module:
        model: Any = super().build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


def test_inside_transformers_own_checkpoints():
    check(CheckpointsItself("bert"), Plan(2, 2), 3)
    # recomputed once for each forward that was kept, and not otherwise
    job = CheckpointsItself("bert")
    model: Any = job.build()
    engine = start(model, job.optimizer(model), config_of(3, **job.keys))
    ran: list[int] = []
    for block in job.blocks(model)[0]:
        block.attention.register_forward_hook(lambda *_: ran.append(1))  # type: ignore
    net = OnEngine(engine, Plan())
    for step in range(3):
        del ran[:]
        net.backward(job.loss(net, At(step, 0, 0)))
        p = probabilities(step, [DEPTH])
        kept = DEPTH - sum(left_out(step, p))
        assert len(ran) == 2 * kept
        engine.step()
    engine.destroy()


class InOneCheckpoint(Stack):
    """Checkpoints around several blocks together."""

    reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, DEPTH, 2):
            part = self.blocks[first : first + 2]

            def run(x: torch.Tensor, part: Any = part) -> torch.Tensor:
                for block in part:
                    x = block(x)
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_blocks_recomputes_what_it_ran(reentrant):
    class Job(LayerDropJob):
        def build(self):
            model = seeded(lambda: InOneCheckpoint(DEPTH, 8))
            model.reentrant = reentrant  # type: ignore[assignment]
            return model

        def window(self, net, at, end_micro):
            """Each forward runs before the backward of the one before: two have the draws of the
            first micro-batch, and the last one's are made before the second one's backward.
            """
            losses: list[torch.Tensor] = []
            if not hasattr(net, "engine"):  # hand-made blocks would recompute the later choice
                for each, drawn in zip(at, (0, 0, 1)):
                    self.by_hand(net.module, replace(each, micro=drawn))
                    losses.append(self.loss_of(net, each))
                    net.backward(losses[-1])
                    end_micro()
                return losses
            for number, each in enumerate(at):
                losses.append(self.loss_of(net, each))
                if number:
                    net.backward(losses[number - 1])
                    end_micro()
            net.backward(losses[-1])
            end_micro()
            return losses

    job = Job("stack")
    plan = Plan(2, 4, 3)
    zero = {"stage": 3, **APART}
    got = train_on_threads(job, plan, engine_opener(3, **job.keys, zero_optimization=zero))
    oracle.compare(got, oracle.run(job, plan), TOLERANCE, oracle.ADAM_ROUNDING)
