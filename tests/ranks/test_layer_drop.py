"""Progressive layer dropping and random layerwise token dropping on ranks, against plain loops
whose blocks are left out, or given the same tokens, by hand. Families of models, stages, resumes
and overflows are rows of ``test_capabilities.py``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import LayerDropSection, TokenDropSection
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.techniques.layer_drop import LayerDrop
from hf_zero.techniques.token_drop import tokens_read
from tests.helpers import oracle
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import (
    OnEngine,
    config_of,
    engine_opener,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.layer_drop import DEPTH, FAMILIES, LayerDropJob, left_out, probabilities
from tests.helpers.models import LENGTH, Stack, floats, seeded, tokens
from tests.helpers.plans import APART
from tests.helpers.ranks import run_ranks
from tests.helpers.token_drop import TokenDropJob, section
from tests.helpers.training import At, Plan, plain_sgd

# What is kept is scaled up, which is up to a factor of 2.5 a block for rounding, too.
TOLERANCE = 1e-4


def check(job, plan, stage, **more):
    got = train_on_threads(job, plan, engine_opener(stage, **job.keys, **more))
    want = oracle.run(job, plan)
    assert any(map(any, job.left_out.values())), "the plain model has left nothing out"
    oracle.compare(got, want, TOLERANCE, oracle.ADAM_ROUNDING)


class CheckpointsItself(LayerDropJob):
    """A model of transformers with its own gradient checkpointing."""

    def build(self):
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

    def body(self, x):
        for first in range(0, DEPTH, 2):
            part = self.blocks[first : first + 2]

            def run(x, part=part):
                for block in part:
                    x = block(x)
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x


@in_turn("reentrant", [False, True])
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
            by_hand = not hasattr(net, "engine")  # whose blocks would recompute the later choice
            for number, (each, drawn) in enumerate(zip(at, (0, 0, 1))):
                if by_hand:
                    self.by_hand(net.module, replace(each, micro=drawn))
                losses.append(self.loss_of(net, each))
                for ready in losses[-1:] if by_hand else losses[number - 1 : number]:
                    net.backward(ready)
                    end_micro()
            if not by_hand:
                net.backward(losses[-1])
                end_micro()
            return losses

    check(Job("stack"), Plan(1, 4, 3), 3, zero_optimization={"stage": 3, **APART})


STEPS, MICROS = 3, 2


@in_turn("stage, bad", [(3, "constant"), (1, "constant"), (1, "no backward")])
def test_ranks_draw_alike_where_one_has_a_batch_without_gradients(stage, bad):
    """Rank 1 has a first micro-batch with a constant loss, or without a backward."""
    job = LayerDropJob("stack")
    models = [job.build() for _ in range(2)]

    def over(rank):
        keys = {**job.keys, "gradient_accumulation_steps": MICROS}
        keys["zero_optimization"] = {"stage": stage, **APART}
        engine = start(models[rank], plain_sgd(models[rank]), config_of(stage, **keys))
        net = OnEngine(engine, Plan(2, MICROS))
        for step in range(STEPS):
            for micro in range(MICROS):
                loss = job.loss_of(net, At(step, micro, rank))
                if rank and not micro and bad == "constant":
                    loss = torch.zeros((), requires_grad=True)
                if not rank or micro or bad == "constant":
                    engine.backward(loss)
                engine.step()
        return full_weights(engine)

    model = job.build()
    optimizer = plain_sgd(model)
    for step in range(STEPS):
        for micro, rank in product(range(MICROS), range(2)):
            if not rank or micro:
                job.by_hand(model, At(step, micro, rank))
                batch = FAMILIES["stack"][1](step, micro, rank)
                (model(**batch).pow(2).mean() / (2 * MICROS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(map(any, job.left_out.values()))
    for got in run_ranks(2, over):
        for name, value in model.named_parameters():
            torch.testing.assert_close(got[name], value.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def test_the_schedule():
    """DeepSpeed's scheduler at steps 0, 1, 5, 9, 10, 11 and 100."""
    for low, high, steps, every, expected in (
        (128, 512, 10, 16, (128, 160, 320, 464, 512, 512, 512)),
        (3, 20, 10, 2, (4, 4, 10, 18, 20, 20, 20)),
        (100, 256, 7, 64, (128, 128, 192, 256, 256, 256, 256)),
        (10, 15, 10, 8, (15, 15, 15, 15, 15, 15, 15)),
    ):
        made = TokenDropSection(
            min_value=low, max_value=high, require_steps=steps, seq_per_step=every
        )
        found = tuple(tokens_read(made).at(step) for step in (0, 1, 5, 9, 10, 11, 100))
        assert found == expected


def test_evaluation_reads_everything_and_classes_come_back():
    job = TokenDropJob("gpt2")
    model: Any = job.build()
    kinds = [type(block) for block in job.blocks(model)[0]]
    plain: Any = job.build()
    ids = tokens(0, 0, 0)
    for enabled in (False, True):
        keys = section()
        keys["data_efficiency"]["data_routing"]["enabled"] = enabled
        engine = start(model, plain_sgd(model), config_of(1, **keys))
        assert bool(engine.pass_runner.module_hooks.left_out.sources) == enabled
        with torch.no_grad():
            assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
        alike = torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
        assert alike != enabled
        engine.destroy()
        assert [type(block) for block in job.blocks(model)[0]] == kinds


def test_a_schedule_outlives_its_engine():
    job = LayerDropJob("gpt2")
    model: Any = job.build()
    section = LayerDropSection(theta=0.5, gamma=0.1)
    assert LayerDrop(section, 0).theta == 1.0
    engine = start(model, plain_sgd(model), config_of(1, **job.keys))
    drop = engine.feature_set.get("progressive_layer_drop", LayerDrop)
    engine.destroy()
    assert drop.theta == 1.0


SCHEDULE = {"require_steps": 2, "seq_per_step": 1}
FALLING = {"min_value": 9, "max_value": 4, "schedule_config": SCHEDULE}


@in_one_item(
    [
        ("gpt2", {"total_layer_num": 7}, f"total_layer_num = 7 .* has {DEPTH} blocks"),
        ("gpt2", {"random_ltd_layer_num": 2}, "random_ltd_layer_num = 2"),
        ("gpt2", {"random_ltd_layer_id": [1, 9]}, r"random_ltd_layer_id names \[9\]"),
        ("t5", {"random_ltd_layer_id": [0]}, r"names \[0\]"),
        ("gpt2", {"random_ltd_layer_id": 3}, "random_ltd_layer_id"),
        ("gpt2", {"random_ltd_layer_id": [1, 1]}, "names a block twice"),
        ("gpt2", {"random_ltd_schedule": {"min_value": 3}}, r"random_ltd_schedule\.max_value"),
        ("gpt2", {"random_ltd_schedule": FALLING}, "min_value = 9 is above max_value = 4"),
        ("gpt2", {"random_ltd_schedule": {"schedule_type": "fixed_root"}}, "schedule_type"),
        ("gpt2", {"layer_token_lr_schedule": {"enabled": True}}, "layer_token_lr_schedule"),
    ]
)
def test_mistakes_in_the_section(case):
    family, ltd, said = case
    model = LayerDropJob(family).build()
    with pytest.raises((ConfigError, NotBuiltError), match=said):
        start(model, plain_sgd(model), config_of(0, **section(**ltd)))


def test_mistakes_that_a_forward_shows():
    model: Any = LayerDropJob("gpt2").build()
    engine = start(model, plain_sgd(model), config_of(0, **section()))
    block = model.transformer.h[1]

    def call(**given):
        def inside(module, args, output):
            block(**{"hidden_states": torch.zeros(2, LENGTH, 32), **given})

        hook = model.transformer.wte.register_forward_hook(inside)
        try:
            return engine(input_ids=tokens(0, 0, 0))
        finally:
            hook.remove()

    with pytest.raises(ConfigError, match="cu_seq_lens_q is of packed sequences"):
        call(cu_seq_lens_q=torch.tensor([0, 4, 9]))
    with pytest.raises(ConfigError, match=r"argument other is a tensor of shape \[9, 3\]"):
        call(other=torch.zeros(LENGTH, 3))
    with pytest.raises(ConfigError, match="its hidden state has 4 dimensions"):
        call(hidden_states=torch.zeros(2, 3, 3, 32))
    block.attn.sliding_window = 4
    with pytest.raises(ConfigError, match="counts a window over what it gets"):
        call(attention_mask=None)
    engine.destroy()
    for ltd, said in (
        ({"hidden_state_order": "seq_batch_dim"}, "hidden_state_order = 'seq_batch_dim'"),
        ({"model_mask_name": "attn_mask"}, "model_mask_name = 'attn_mask' is no argument"),
    ):
        model = LayerDropJob("gpt2").build()
        engine = start(model, plain_sgd(model), config_of(0, **section(**ltd)))
        with pytest.raises(ConfigError, match=said):
            engine(input_ids=tokens(0, 0, 0))
        with torch.no_grad():
            engine(input_ids=tokens(0, 0, 0))
        engine.destroy()


class Encoder(nn.Module):
    """torch's own layers, whose hidden states have tokens first, [9, 2, 8], unless told."""

    def __init__(self, batch_first=False):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_hidden_states_with_tokens_first():
    def run(batch_first, order):
        model = seeded(lambda: Encoder(batch_first))
        keys = section([1], hidden_state_order=order)
        engine = start(model, plain_sgd(model), config_of(0, **keys))
        x = floats(0, 0, 0, 2, LENGTH, 8)
        out: torch.Tensor = engine(x if batch_first else x.transpose(0, 1))
        engine.destroy()
        return out if batch_first else out.transpose(0, 1)

    torch.testing.assert_close(run(False, "seq_batch_dim"), run(True, "batch_seq_dim"))
    for batch_first, order, other in [
        (False, "batch_seq_dim", "seq_batch_dim"),
        (True, "seq_batch_dim", "batch_seq_dim"),
    ]:
        said = f"batch_first = {batch_first}; write {other}"
        with pytest.raises(ConfigError, match=said):
            run(batch_first, order)


@in_one_item(["tensor", "sequence", "expert"])
def test_ranks_that_compute_a_block_together_must_draw_alike(axis: str) -> None:
    keys = {"progressive_layer_drop": {"enabled": True, "per_rank": True}}
    drop = LayerDrop.from_config(ZeroConfig.from_dict(keys))
    dims = SimpleNamespace(size=lambda asked: 2 if asked == axis else 1)
    plan = SimpleNamespace(dims=dims, model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=f"without {axis} parallelism"):
        drop.check(plan)
