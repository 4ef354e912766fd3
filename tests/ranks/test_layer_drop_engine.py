"""Progressive layer dropping: features that it leaves as they are (evaluation, classes, copies),
traffic that it saves, backwards that meet other choices, and refusals.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertLayer

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.techniques.layer_drop import draw
from hf_zero.zero.reduce.step_agreement import StepAgreement
from tests.helpers import oracle
from tests.helpers.capability import WithoutGradients
from tests.helpers.cells import in_turn
from tests.helpers.engines import OnEngine, config_of, full_weights, start, train_on_threads
from tests.helpers.layer_drop import DEPTH, LayerDropJob, left_out, probabilities
from tests.helpers.models import Stack, features, floats, seeded, tokens
from tests.helpers.plans import APART
from tests.helpers.ranks import RankFailed
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, Trace, adamw, plain_sgd
from tests.ranks.cases import expect, values_of

KEYS = LayerDropJob("stack").keys
MICRO = 2
LATE = 50  # steps, after which most blocks are left out
TOGETHER = {"stage3_module_granularity_threshold": 10**6, "reduce_bucket_size": 10**6}


def small():
    return seeded(lambda: Stack(DEPTH, 8))


def opened(model, stage=3, accumulation=1, units=APART, **more):
    zero = {"stage": stage, **units}
    plan = Plan(accumulation=accumulation)
    return start(
        model, adamw(model), config_of(stage, plan, **{**KEYS, "zero_optimization": zero, **more})
    )


def test_numbers_are_uniform_and_apart():
    numbers = torch.tensor([draw(3, step, 0, 32) for step in range(300)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=0.01)
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.3
    first = draw(3, 5, 1, 8)
    assert all(draw(*each) != first for each in [(4, 5, 1, 8), (3, 6, 1, 8), (3, 5, 2, 8)])
    assert draw(3, 5, 1, 8, 1) != first
    assert draw(3, 5, 1, 4) == first[:4], "a longer stack changes nothing for the others"


@in_turn("stage", [2, 3])
@on_each_rank(2, build=small)
def test_what_all_ranks_leave_out_is_neither_gathered_nor_reduced(rank, model, stage):
    """Seen at the process group, micro-batch by micro-batch; nothing is asked of the device."""
    engine = opened(model, stage, MICRO)
    stats = engine.mesh.stats
    stats.keep_log = True
    skipped, engine.counters.global_steps = 0, LATE
    for step in range(LATE, LATE + 3):
        p, used = probabilities(step, [DEPTH]), [False] * DEPTH
        for micro in range(MICRO):
            stats.log.clear()
            engine.backward(squared(engine, At(step, micro, rank)))
            out = left_out(step, p, micro)
            used = [one or not other for one, other in zip(used, out)]
            for block, gone in enumerate(out):
                sent = [op for op, key, _ in stats.log if f"blocks.{block}" in key]
                # the last one stays from the end of the forward to its backward
                gathers = (2 if block < DEPTH - 1 else 1) if stage == 3 and not gone else 0
                assert sent.count("all_gather") == gathers, (step, micro, block, sent)
                assert sent.count("reduce_scatter") == (not gone), (step, micro, block, sent)
            stats.log.clear()
            engine.step()
            skipped += sum(out)
        for block, once in enumerate(used):
            sent = [op for op, key, _ in stats.log if key.startswith(f"updated blocks.{block}")]
            assert len(sent) == (once and stage == 2), (step, block, sent)
    assert skipped > 10
    engine.destroy()


class ByItself(LayerDropJob):
    begins, steps = LATE, 4

    def __init__(self):
        super().__init__("stack")

    def optimizer(self, model):
        return adamw(model)

    def by_hand(self, model, at):
        super().by_hand(model, replace(at, step=self.begins + at.step))


class Penalized(ByItself):
    """A penalty on weights brings a gradient to a block that may be left out."""

    begins, steps = 0, 8  # the first backward, which all blocks have a part in, sets the order

    def loss_of(self, net, at):
        penalty = sum(p.pow(2).sum() for p in net.module.blocks[DEPTH - 1].parameters())
        return super().loss_of(net, at) + 0.1 * penalty


def check(job, stage, steps, units=APART):
    plan = Plan(2, steps, MICRO)

    def opener(model, optimizer, plan):
        engine = opened(model, stage, MICRO, units)
        engine.counters.global_steps = job.begins
        return WithoutGradients(engine, plan)

    got, want = train_on_threads(job, plan, opener), oracle.run(job, plan)
    want = Trace(want.losses, want.norms, got.grads, want.weights)
    oracle.compare(got, want, 1e-4, weight_floor=1e-5)


@in_turn(
    "stage, kind, units",
    [
        (1, ByItself, TOGETHER),
        (2, Penalized, APART),
    ],
)
def test_which_parameters_are_unused_is_known_without_reading_what_ranks_have_sent(
    stage, kind, units, monkeypatch
):
    """A penalty on weights brings gradients to what was left out: that is read."""
    if kind is not Penalized:
        monkeypatch.setattr(StepAgreement, "ranks_with_gradients", None)
    job = kind()
    check(job, stage, job.steps, units)
    steps = range(job.begins, job.begins + job.steps)
    of_steps = [[job.left_out[step, micro, 0] for micro in range(MICRO)] for step in steps]
    unused = sum(all(of_block) for each in of_steps for of_block in zip(*each))
    assert unused > 3, "blocks that no micro-batch of a step has used"


def test_a_penalty_on_one_rank_alone_is_refused_where_it_would_part_the_ranks():
    def run(rank, model):
        net = OnEngine(opened(model, 2, units=TOGETHER), Plan())
        for step in range(8):
            net.backward((Penalized if rank else ByItself)().loss(net, At(step, 0, rank)))
            net.step()

    with pytest.raises(RankFailed, match=r"blocks\.4.* got a gradient on some ranks only"):
        on_ranks(2, run, build=small)


def assigned(parameter, value):
    parameter.grad = value


CPU = {"offload_optimizer": {"device": "cpu"}}


@in_turn(
    "stage, write, zero",
    [
        (1, assigned, {}),
        (2, hf_zero.safe_set_full_grad, TOGETHER),
        (3, assigned, CPU),
        (3, hf_zero.safe_set_full_grad, {}),
    ],
)
def test_a_gradient_that_a_script_writes_to_a_dropped_block_is_used(stage, write, zero):
    """In every step one is written to a weight of each block, its bias stays as it is."""
    job, steps = ByItself(), range(LATE, LATE + 3)

    def written(model, step, write):
        for block in model.blocks:
            write(block.up.weight, torch.full((16, 8), 0.1 * (step - LATE) + 0.2))

    def run(rank, model):
        engine = opened(model, stage, units=APART | zero)
        engine.counters.global_steps = LATE
        for step in steps:
            engine.backward(squared(engine, At(step, 0, rank)))
            written(model, step, write)
            engine.step()
        return full_weights(engine)

    plain = small()
    optimizer = adamw(plain)
    for step in steps:
        for rank in range(2):
            LayerDropJob.by_hand(job, plain, At(step, 0, rank))
            (squared(plain, At(step, 0, rank)) / 2).backward()
        written(plain, step, assigned)
        optimizer.step()
        optimizer.zero_grad()
    assert sum(map(sum, job.left_out.values())) > 6
    expect(values_of(plain), run, build=small, tolerance=1e-4, floor=1e-5)


class Several(ByItself):
    """``losses`` yields those of two micro-batches."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def window(self, net, at, end_micro):
        def draw(micro):
            if hasattr(net, "engine"):
                return
            for block in net.module.blocks:
                vars(block).pop("forward", None)
            if micro is not None:
                self.by_hand(net.module, replace(at[0], micro=micro))

        found = []
        for loss in self.losses(net, at[0].rank, draw):
            net.backward(loss)
            end_micro()
            found.append(loss)
        return found


def older(net, rank, draw):
    """A graph of the first micro-batch has a part in the backward of the second."""
    draw(0)
    old = squared(net, At(0, 2, rank))
    yield squared(net, At(0, 0, rank))
    draw(1)
    yield squared(net, At(0, 1, rank)) + old


def alone(net, rank, draw):
    """All blocks called by themselves before the forward of the model."""
    for micro in range(MICRO):
        draw(None)
        x = floats(0, micro, rank, 3, 8)
        for block in net.module.blocks:
            x = block(x)
        draw(micro)
        yield x.pow(2).mean() + squared(net, At(0, micro, rank))


@in_turn("losses, stage", [(older, 1), (alone, 3)])
def test_a_backward_through_forwards_that_have_left_out_other_blocks(losses, stage):
    """A block that any of them uses is gathered and reduced."""
    job = Several(losses)
    check(job, stage, 2)
    assert any(map(any, job.left_out.values()))


def only_training(model, *blocks):
    model.requires_grad_(False)
    for at in blocks:
        model.blocks[at].requires_grad_(True)
    return model


@in_turn("per_rank", [False, True])
def test_a_block_that_trains_is_kept_where_nothing_else_does(per_rank):
    section = {"enabled": True, "theta": 0.05, "gamma": 1.0, "per_rank": per_rank}

    def run(rank, model):
        only_training(model, 0, DEPTH - 1)
        run_steps(opened(model, progressive_layer_drop=section), rank, range(8))

    on_ranks(2, run, build=small)


@in_turn("blocks", [(DEPTH - 1,), (1, 3)])
@on_each_rank(1, build=small)
def test_the_block_that_is_always_kept_is_not_scaled(rank, model, blocks):
    """Its p is 1, so the expectation of its output is that of evaluation."""
    job, plain = LayerDropJob("stack"), small()
    engine = opened(only_training(model, *blocks), 0)
    others = 0
    for step in range(LATE, LATE + 8):
        p = probabilities(step, [DEPTH])
        p[blocks[0]] = 1.0
        job.leave_out(plain, left_out(step, p), p)
        others += sum(left_out(step, p))
        engine.counters.global_steps = step
        x = features(step, 0, rank)
        torch.testing.assert_close(engine(x), plain(x))
    assert others > 8
    engine.destroy()


def late(family, stage):
    """An engine most of whose blocks are left out."""
    model: Any = LayerDropJob(family).build()
    engine = start(model, plain_sgd(model), config_of(stage, **KEYS))
    engine.counters.global_steps = LATE
    return engine, model


def test_outputs_are_those_of_the_whole_model():
    """Their kinds, the number of hidden states, and what a cache holds."""
    engine, model = late("t5", 1)
    given = {"input_ids": tokens(0, 0, 0), "output_hidden_states": True}
    given["decoder_input_ids"] = tokens(1, 0, 0)
    kinds = []
    for training in (True, False):
        model.train(training)
        out = engine(**given).items()
        kinds.append({k: len(v) if isinstance(v, tuple) else v.__class__ for k, v in out})
    assert kinds[0] == kinds[1] and any(left_out(LATE, probabilities(LATE, [DEPTH])))
    engine.destroy()


def test_classes_stay_what_they_are():
    model: Any = LayerDropJob("bert").build()
    keys, layer = list(model.state_dict()), model.bert.encoder.layer[2]
    off = {**KEYS, "progressive_layer_drop": {"enabled": False, "theta": 0.2}}
    engine = start(model, plain_sgd(model), config_of(0, **off))
    assert type(layer) is BertLayer and not engine.pass_runner.module_hooks.left_out.sources
    engine.destroy()
    engine = start(model, plain_sgd(model), config_of(0, **KEYS))
    assert type(layer) is not BertLayer and isinstance(layer, BertLayer)
    assert type(layer).__name__ == "BertLayer" and type(layer).__module__ == BertLayer.__module__
    assert type(layer).forward is BertLayer.forward, "transformers asks by it whether to checkpoint"
    assert repr(layer).startswith("BertLayer(") and list(model.state_dict()) == keys
    assert type(copy.deepcopy(layer)) is BertLayer
    with pytest.raises(PartitionError, match="cannot be pickled whole"):
        pickle.dumps(layer)
    engine.destroy()
    assert type(layer) is type(pickle.loads(pickle.dumps(layer))) is BertLayer


class Narrowing(nn.Linear):
    """Returns fewer features than it is given."""


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Narrowing(width, width - 1) for width in (7, 6, 5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@on_each_rank(1)
def test_what_cannot_be_left_out_is_refused(rank):
    with pytest.raises(ConfigError, match=r"layer_drop\.enabled concerns .* Sequential has"):
        opened(nn.Sequential(nn.Linear(4, 4)))
    engine = opened(Narrow(), 0)
    with pytest.raises(ConfigError, match="cannot leave out Narrowing"):
        engine(features(0, 0, 0))
    engine.destroy()
    for section, zero, said in (
        ({"theta": 0.0}, {}, r"progressive_layer_drop\.theta"),
        ({"gamma": -0.1}, {}, r"progressive_layer_drop\.gamma"),
    ):
        config = {"progressive_layer_drop": {"enabled": True, **section}, "zero_optimization": zero}
        with pytest.raises(ConfigError, match=said):
            ZeroConfig.from_dict(config)
