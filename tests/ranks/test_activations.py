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
from hf_zero.zero import sharded_model
from tests.helpers.broken_stacks import Armed
from tests.helpers.capabilities import RECOMPUTATION
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.late_transfers import Late
from tests.helpers.models import floats, seeded
from tests.helpers.stacks import on_ranks, run_steps, squared, stack
from tests.helpers.training import At, adamw
from tests.helpers.ways import WAYS
from tests.ranks.cases import trains_alike


@pytest.fixture(autouse=True)
def moved(monkeypatch):
    """On the CPU activations would have nowhere to go."""
    made: list[Late] = []

    def late(device):
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(activations, "transfers_of", late)
    yield made


OWN = "non-reentrant checkpoint around each block"


@in_turn("name", [*(n for n in RECOMPUTATION if "compiled" not in n and " of " not in n), OWN])
def test_no_further_gather(name, moved):
    """A block's backward gathers it once, for the recomputation and for the gradients."""
    del moved[:]
    config = RECOMPUTATION[name].keys(3, Path()) if name != OWN else {}

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, **config))
        for number in range(3):
            engine.mesh.stats.counts.clear()
            run_steps(engine, rank, [number])
        counts = Counter(engine.mesh.stats.counts)
        engine.destroy()
        # four units; the root and the last block stay from forward to backward
        assert (counts["all_gather"], counts["reduce_scatter"]) == (6, 4)

    on_ranks(2, run, build=WAYS[OWN].build if name == OWN else stack)
    assert any(late.sent_bytes for late in moved) == ("on the host" in name)


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


def saves_offloaded(late):
    """Whether tensors that autograd saves outside of the model go to the host."""
    before = late.sent_bytes
    torch.exp(torch.randn(100, requires_grad=True))
    return late.sent_bytes > before


def test_an_interrupted_forward_leaves_no_offload(moved):
    """The next forward ends no hooks that a script has set since."""

    def run(rank, model):
        config = config_of(1, activation_offload={"enabled": True, "min_bytes": 1})
        engine = start(model, adamw(model), config)
        run_steps(engine, rank, [0])
        model.at, model.error = "forward", KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            squared(engine, At(1, 0, rank))
        model.at = ""
        assert moved[-1].sent_bytes and not saves_offloaded(moved[-1])
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, id):
            with torch.no_grad():
                squared(engine, At(1, 0, rank))
            torch.exp(torch.randn(3, requires_grad=True))
            assert packed
        run_steps(engine, rank, [1])
        engine.destroy()

    on_ranks(1, run, build=lambda: seeded(Armed))


class CheckpointsItself(torch.nn.Module):
    """Small blocks, each under a selective checkpoint of its own code."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Unflatten(0, (2, 2)),
                torch.nn.Linear(8, 8),
                torch.nn.Tanh(),
                torch.nn.Flatten(0, 1),
            )
            for _ in range(3)
        )

    def forward(self, x):
        saved = [torch.ops.aten.addmm.default, torch.ops.aten.view.default]
        for block in self.blocks:
            x = checkpoint(
                block,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(saved),
            )
        return x


# units of three blocks, and of one, whose updated parameters share a message that blocks wait for
OWN_CODE = [(1, True, 10_000), (1, True, 100), (3, False, 10_000), (3, True, 10_000)]


@in_turn("stage, input_requires_grad, together", OWN_CODE)
def test_selective_checkpoints_in_the_models_own_code(
    stage, input_requires_grad, together, monkeypatch
):
    monkeypatch.setattr(sharded_model, "OVERLAPS_ON_HOST", True)

    def micro(net, at):
        x = floats(at.step, at.micro, at.rank, 4, 8).requires_grad_(input_requires_grad)
        loss = net(x).square().mean()
        net.backward(loss)
        return loss

    zero = {"stage": stage, "stage3_module_granularity_threshold": together}
    trains_alike(micro, stage, make=CheckpointsItself, optimizer=adamw, zero_optimization=zero)
