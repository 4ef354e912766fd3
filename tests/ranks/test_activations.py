"""Checkpointed blocks and activations in host memory: checkpoints of models themselves, gathers,
bytes, broken passes. The plain loop at every stage is a row of ``test_capabilities.py``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hf_zero.activations import policy as activations
from tests.helpers import oracle
from tests.helpers.capabilities import RECOMPUTATION, SMALL
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import (
    config_of,
    engine_opener,
    full_grads,
    start,
    train_on_threads,
)
from tests.helpers.late_transfers import Late
from tests.helpers.models import seeded
from tests.helpers.offloads import ended, same
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw
from tests.helpers.ways import WAYS

SOME_WAYS = [
    "a block called twice, each time under a checkpoint",
    "reentrant checkpoint around two blocks, another block before and after",
    "gradient_checkpointing_enable(use_reentrant=False) on t5",
]
PLAN = Plan(ranks=2, steps=2, accumulation=2, clip=0.5)


@pytest.fixture(autouse=True)
def moved(monkeypatch):
    """On the CPU activations would have nowhere to go."""
    made: list[Late] = []

    def late(device):
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(activations, "transfers_of", late)
    yield made


@pytest.mark.turns
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", SOME_WAYS)
def test_offload_under_the_checkpoints_of_a_model(way, stage):
    job = WAYS[way]
    oracle.compare(
        train_on_threads(job, PLAN, engine_opener(stage, activation_offload=SMALL)),
        oracle.kept(job, PLAN),
    )


@in_one_item([name for name in RECOMPUTATION if "compiled" not in name])
def test_no_further_gather(name):
    """A block's backward gathers it once, for the recomputation and for the gradients."""
    config = RECOMPUTATION[name].keys(3, Path())

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, **config))
        for number in range(4):
            engine.mesh.stats.counts.clear()
            run_steps(engine, rank, [number])
        counts = Counter(engine.mesh.stats.counts)
        engine.destroy()
        return counts

    for counts in on_ranks(2, run):
        # four units; the root and the last block stay from forward to backward
        assert counts["all_gather"] == 6
        assert counts["reduce_scatter"] == 4


def test_cpu_checkpointing_without_checkpoints_says_so(heard, moved):
    def run(rank, model):
        engine = start(
            model, adamw(model), config_of(2, activation_checkpointing={"cpu_checkpointing": True})
        )
        run_steps(engine, rank, range(2))
        engine.destroy()

    on_ranks(1, run)
    assert sum("cpu_checkpointing has nothing to move" in line for line in heard) == 1
    assert moved[0].sent_bytes == 0


def test_cpu_checkpointing_of_a_model_that_checkpoints_by_itself(moved):
    job = WAYS["gradient_checkpointing_enable(use_reentrant=False) on bert"]
    plan = Plan(ranks=1, steps=2)
    config = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "activation_offload": {**SMALL, "enabled": False},
    }
    oracle.compare(train_on_threads(job, plan, engine_opener(3, **config)), oracle.kept(job, plan))
    assert moved[0].sent_bytes > 0


def test_where_the_device_is_the_host_nothing_moves(monkeypatch, heard_in_full):
    monkeypatch.undo()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(2, activation_offload=True))
        assert engine.patches.activations.offload is None
        engine.destroy()

    on_ranks(1, run)
    assert any("activations are not offloaded" in line for line in heard_in_full)


@in_turn("error", [KeyboardInterrupt, ValueError])
def test_a_forward_that_is_broken_off(error, moved):
    on_the_host = RECOMPUTATION["checkpoints on the host"].keys(3, Path())

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, **on_the_host))
        blocks = dict(model.named_modules())
        inner, times = blocks["blocks.1"].forward, [0]

        def once(*args, **kwargs):
            times[0] += 1
            if times[0] == 2:
                raise error
            return inner(*args, **kwargs)

        blocks["blocks.1"].forward = once
        for number in range(3):
            try:
                engine.backward(squared(engine, At(number // 2, 0, rank)))
            except error:
                engine.zero_grad()
                continue
            engine.step()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        blocks["blocks.1"].forward = inner
        return ended(engine)

    def plain(rank, model):
        engine = start(model, adamw(model), config_of(3))
        run_steps(engine, rank, (0, 1))
        return ended(engine)

    same(on_ranks(1, run)[0], on_ranks(1, plain)[0], exact=True)


@on_each_rank(1)
def test_host_memory_is_kept_over_steps_and_given_back(rank, model, moved):
    engine = start(model, adamw(model), config_of(2, activation_offload=SMALL))
    offload, sizes = engine.patches.activations.offload, []
    for number in range(3):
        run_steps(engine, rank, [number])
        sizes.append(offload.slabs.nbytes)
    assert sizes[0] > 0 and len(set(sizes)) == 1
    engine.destroy()
    assert offload.slabs.nbytes == 0


class CheckpointsItself(torch.nn.Module):
    """Small blocks, one unit together, each under a selective checkpoint of its own code."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)
        )

    def forward(self, x):
        saved = [torch.ops.aten.addmm.default]
        for block in self.blocks:
            x = checkpoint(
                block,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(saved),
            )
        return x


@in_turn("stage, input_requires_grad", [(0, True), (1, False), (2, True), (3, False), (3, True)])
def test_selective_checkpoints_in_the_models_own_code(stage, input_requires_grad):
    def batch():
        generator = torch.Generator().manual_seed(1)
        return torch.randn(4, 8, generator=generator).requires_grad_(input_requires_grad)

    plain = seeded(CheckpointsItself)
    plain(batch()).square().mean().backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        engine.backward(engine(batch()).square().mean())
        for name, grad in full_grads(engine).items():
            assert torch.allclose(grad, wanted[name], rtol=1e-5, atol=1e-8), name
        engine.step()

    on_ranks(2, run, build=lambda: seeded(CheckpointsItself))
