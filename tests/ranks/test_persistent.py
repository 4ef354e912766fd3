"""Small parameters that stay whole between steps at stage 3: current and readable after each step,
with no gathers of their own, whatever the rest of the configuration is.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError, ReleasedParameterError
from hf_zero.zero.layout.parameter import LiveParameter, ReleasedParameter, ZeroParamStatus
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import (
    OnEngine,
    config_of,
    start,
    train_on_threads,
)
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import offload
from tests.helpers.stacks import by_hand, on_ranks, run_steps
from tests.helpers.training import Plan, StackJob, adamw

# of SMALL are biases, norms and the scale; of ROOT all outside of blocks, too
NONE, SMALL, ROOT, ALL = 0, 64, 256, 1_000_000


class Scaled(Stack):
    """A stack with a learned temperature, as CLIP has one: in the root, of no dimension."""

    def __init__(self, depth=3):
        super().__init__(depth)
        self.logit_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return super().forward(x) * self.logit_scale.exp()


class ScaledJob(StackJob):
    name = "a stack with a temperature"
    model = Scaled


def scaled():
    return seeded(Scaled)


def zero_of(threshold, way="none", folder=Path()):
    section = {"stage": 3} if way == "none" else offload(way, 3, folder)
    return section | {"stage3_param_persistence_threshold": threshold}


def opened(model, threshold, way="none", folder=Path(), precision="fp32", **zero):
    section = zero_of(threshold, way, folder) | zero
    config = config_of(3, Plan(precision=precision), zero_optimization=section)
    return start(model, adamw(model), config)


def persistent(model, threshold):
    return {name: p for name, p in model.named_parameters() if p.numel() <= threshold}


class Reading(OnEngine):
    """Reads the persistent parameters after each step, without gathering anything."""

    def __init__(self, engine, plan, threshold):
        super().__init__(engine, plan)
        self.threshold = threshold

    def step(self):
        super().step()
        whole = persistent(self.module, self.threshold)
        values = {name: p.detach().float().clone() for name, p in whole.items()}
        if whole:
            self.memory.setdefault("scales", []).append(self.module.logit_scale.item())
        for name, p in whole.items():
            master = hf_zero.safe_get_full_fp32_param(p)
            assert torch.equal(values[name], master.to(p.dtype).float()), name


@in_turn(
    "threshold, ranks, accumulation, precision, way",
    [
        (SMALL, 3, 2, "bf16", "optimizer on cpu"),
        (SMALL, 2, 1, "fp16", "all in files"),
        (ALL, 3, 2, "fp32", "none"),
        (ALL, 1, 2, "fp32", "all on cpu"),
    ],
)
def test_against_the_oracle(threshold, ranks, accumulation, precision, way, tmp_path):
    plan = Plan(ranks, 3, accumulation, precision, clip=0.5)
    seen: list[Reading] = []

    def opener(model, optimizer, plan):
        config = config_of(3, plan, zero_optimization=zero_of(threshold, way, tmp_path))
        seen.append(Reading(start(model, optimizer, config), plan, threshold))
        return seen[-1]

    job = ScaledJob()
    oracle.accept(train_on_threads(job, plan, opener), job, plan, 3)
    scales: list[float] = []
    windows = [[(1.0 / accumulation, micro) for micro in range(accumulation)]] * 3
    read = lambda _, model, __: scales.append(model.logit_scale.item())  # noqa: E731
    by_hand(adamw, windows, ranks, 0.5, read, scaled)
    for session in seen:
        found = session.memory["scales"][accumulation - 1 :: accumulation]
        rel = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-3}[precision]
        assert found == pytest.approx(scales, rel=rel)


# ---- what a script may do with them ----


def test_what_is_read_and_asked_between_steps():
    def run(rank, model):
        engine = opened(model, SMALL)
        run_steps(engine, rank, [0])
        scale, weight = model.logit_scale, model.head.weight
        assert isinstance(scale, LiveParameter) and scale.ds_status is ZeroParamStatus.AVAILABLE
        assert (scale.ds_numel, scale.ds_shape, model.head.bias.ds_numel) == (1, torch.Size(), 5)
        assert scale.ds_persist and model.head.bias.ds_persist
        sharded = [p for p in model.parameters() if not p.ds_persist]
        assert sharded and all(p.ds_status.name == "NOT_AVAILABLE" for p in sharded)
        assert scale.item() == float(hf_zero.safe_get_full_fp32_param(scale))
        assert scale.item() != pytest.approx(0.3, abs=1e-6)
        assert type(weight) is ReleasedParameter
        with pytest.raises(ReleasedParameterError, match=r"head\.weight"):
            weight.sum()
        with hf_zero.GatheredParameters([scale], modifier_rank=1):
            scale.data.fill_(0.25 * (1 + rank))
        assert scale.item() == float(hf_zero.safe_get_full_fp32_param(scale)) == 0.5
        state = engine.module.state_dict()
        assert state["logit_scale"].data_ptr() != scale.data_ptr()
        assert copy.deepcopy(model.head.bias).equal(model.head.bias)
        with (
            pytest.raises(PartitionError, match="given a tensor of shape"),
            hf_zero.GatheredParameters([weight]),
        ):
            model.head.bias.data = torch.zeros(7)
        kept = {name: p.detach().clone() for name, p in persistent(model, SMALL).items()}
        engine.destroy()
        for name, value in kept.items():
            p = model.get_parameter(name)
            assert type(p) is nn.Parameter and torch.equal(p, value)
        return [value.item() for value in (state["logit_scale"], kept["logit_scale"])]

    first, second = on_ranks(2, run, build=scaled)
    assert first == second == [0.5, 0.5]


# ---- messages ----


def travelled(threshold, **more):
    """(operation, name) in the fourth step on each of two ranks; blocks are units."""

    def run(rank, model):
        engine = opened(model, threshold, stage3_module_granularity_threshold=1000, **more)
        engine.mesh.stats.keep_log = True
        for number in range(4):
            engine.mesh.stats.log.clear()
            run_steps(engine, rank, [number])
        return [(what, key) for what, key, _ in engine.mesh.stats.log]

    return on_ranks(2, run, build=scaled)


@in_turn("threshold", [NONE, SMALL, ROOT])
def test_they_cost_no_gather_but_one_message_a_step_and_share_a_reduction(threshold):
    """Small gradients wait for each other; large ones are reduced before them."""
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for log in travelled(threshold):
        gathers = [key for what, key in log if what == "all_gather"]
        passes = [key for key in gathers if not key.startswith("updated")]
        assert passes == [*(["(root)"] if threshold < ROOT else []), *blocks, *blocks[1::-1]]
        assert len(gathers) - len(passes) == (threshold > NONE)
        sent = [key for what, key in log if what == "reduce_scatter"]
        if threshold == SMALL:
            assert sent[:3] == [f"{block}|trainable|float32" for block in blocks[::-1]]
            assert sent[3:] == ["blocks.2|trainable|float32|whole..|trainable|float32"]


# ---- which they are ----


# ---- checkpoints and memory ----
