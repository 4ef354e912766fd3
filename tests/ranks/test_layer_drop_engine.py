"""Progressive layer dropping: features that it leaves as they are (evaluation, classes, copies,
checkpoints of a run), traffic that it saves, and refusals.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertLayer

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.techniques.layer_drop import draw, keep_probability
from hf_zero.techniques.schedules import Decay
from hf_zero.zero.reduce.norm import Usage
from tests.helpers import oracle
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.layer_drop import DEPTH, GAMMA, THETA, LayerDropJob, left_out, probabilities
from tests.helpers.models import Block, Stack, features, floats, seeded, tokens
from tests.helpers.plans import APART
from tests.helpers.ranks import RankFailed
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd

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


def test_the_schedule_of_the_paper():
    assert Decay(0.5, 0.001).at(0) == 1.0
    assert Decay(0.5, 0.001).at(10_000) == pytest.approx(0.5, abs=1e-4)
    assert [keep_probability(i, 12, 0.5) for i in (1, 6, 12)] == pytest.approx([23 / 24, 0.75, 0.5])
    for step in (0, 1, 7):
        p = [keep_probability(i, DEPTH, Decay(THETA, GAMMA).at(step)) for i in range(1, DEPTH + 1)]
        assert p == pytest.approx(probabilities(step, [DEPTH]))


def test_numbers_are_uniform_and_apart():
    numbers = torch.tensor([draw(3, step, 0, 64) for step in range(300)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=0.01)
    assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.3
    first = draw(3, 5, 1, 8)
    assert all(draw(*each) != first for each in [(4, 5, 1, 8), (3, 6, 1, 8), (3, 5, 2, 8)])
    assert draw(3, 5, 1, 8, 1) != first
    assert draw(3, 5, 1, 4) == first[:4], "a longer stack changes nothing for the others"


@in_turn("stage", [2, 3])
@on_each_rank(2, build=lambda: seeded(lambda: Stack(DEPTH, 400)))
def test_what_all_ranks_leave_out_is_neither_gathered_nor_reduced(rank, model, stage):
    """Seen at the process group, micro-batch by micro-batch; nothing is asked of the device."""
    engine = opened(model, stage, MICRO)
    stats = engine.mesh.stats
    stats.keep_log = True
    skipped = 0
    for step in range(6):
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


def penalized(net, model, at):
    """A loss whose penalty on weights brings a gradient to a block that may be left out."""
    penalty = sum(p.pow(2).sum() for p in model.blocks[DEPTH - 1].parameters())
    return squared(net, at) + 0.1 * penalty


def twice(net, model, at):
    """A loss of two forwards, which leave out the same blocks."""
    x = features(at.step, 0, at.rank)
    return (net(x) * net(-x)).pow(2).mean()


def by_itself(net, model, at):
    return squared(net, at)


def close(answers, plain):
    for weights in answers:
        oracle.compare_tensors("weights", weights, dict(plain.named_parameters()), 1e-4, 1e-5)


def trained(run, loss_of, steps):
    """Compare what two ranks have trained with the plain model, whose optimizer leaves alone what
    no micro-batch of a step has used.
    """
    plain: Any = small()
    optimizer, job = adamw(plain), LayerDropJob("stack")
    for step in range(steps):
        for micro, rank in itertools.product(range(MICRO), range(2)):
            at = At(step, micro, rank)
            job.by_hand(plain, at)
            (loss_of(plain, plain, at) / 2 / MICRO).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(on_ranks(2, run, build=small), plain)
    return job.left_out


@pytest.mark.parametrize("units", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("stage, loss_of", [(1, by_itself), (3, twice), (2, penalized)])
def test_which_parameters_are_unused_is_known_without_reading_what_ranks_have_sent(
    loss_of, stage, units, monkeypatch
):
    """Whether blocks are units of their own or share one. A penalty on the weights brings gradients
    to what was left out: that is read.
    """
    if loss_of is not penalized:
        monkeypatch.setattr(Usage, "counts", None)

    def run(rank, model):
        engine = opened(model, stage, MICRO, units)
        for step, micro in itertools.product(range(8), range(MICRO)):
            engine.backward(loss_of(engine, model, At(step, micro, rank)))
            engine.step()
        return full_weights(engine)

    outs = trained(run, loss_of, 8)
    of_steps = [[outs[step, micro, 0] for micro in range(MICRO)] for step in range(8)]
    unused = sum(all(of_block) for each in of_steps for of_block in zip(*each))
    assert unused > 3, "blocks that no micro-batch of a step has used"


@in_turn("stage", [0, 2])
def test_a_penalty_on_one_rank_alone_is_refused_where_it_would_part_the_ranks(stage):
    def run(rank, model):
        engine = opened(model, stage, units=TOGETHER)
        for step in range(8):
            loss_of = penalized if rank else by_itself
            engine.backward(loss_of(engine, model, At(step, 0, rank)))
            engine.step()

    with pytest.raises(RankFailed, match=r"blocks\.4.* got a gradient on some ranks only"):
        on_ranks(2, run, build=small)


def test_a_run_that_goes_back_makes_the_decisions_of_the_step(tmp_path):
    """Whatever was run since, evaluation with a graph included."""

    def micro_batches(engine, rank):
        losses = []
        for _ in range(6):
            loss = squared(engine, At(3, 0, rank))
            engine.backward(loss)
            losses.append(float(loss.detach()))
        return losses

    def run(rank, model):
        engine = opened(model)
        run_steps(engine, rank, range(3))
        engine.save_checkpoint(str(tmp_path / "run"))
        first = micro_batches(engine, rank)
        assert len({*first}) > 1
        engine.load_checkpoint(str(tmp_path / "run"))
        engine.eval()
        squared(engine, At(3, 0, rank))
        engine.train()
        squared(engine, At(3, 0, rank))
        assert micro_batches(engine, rank) == first

    on_ranks(2, run, build=small)


@in_turn("per_rank", [False, True])
def test_a_block_that_trains_is_kept_where_nothing_else_does(per_rank):
    section = {"enabled": True, "theta": 0.05, "gamma": 1.0, "per_rank": per_rank}

    def build():
        model = small()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith((f"blocks.{DEPTH - 1}.", "blocks.0.")))
        return model

    def run(rank, model):
        run_steps(opened(model, progressive_layer_drop=section), rank, range(12))

    on_ranks(2, run, build=build)


def late(family, stage):
    """An engine most of whose blocks are left out."""
    model: Any = LayerDropJob(family).build()
    engine = start(model, plain_sgd(model), config_of(stage, **KEYS))
    engine.counters.global_steps = LATE
    return engine, model


def test_evaluation_and_generation_run_every_block():
    plain: Any = LayerDropJob("gpt2").build()
    engine, model = late("gpt2", 3)
    ids = tokens(0, 0, 0)

    def alike():
        return torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)

    model.eval(), plain.eval()
    assert alike()
    made, wanted = (
        each.generate(ids, max_new_tokens=4, do_sample=False) for each in (model, plain)
    )
    assert torch.equal(made, wanted)
    model.train(), plain.train()
    with torch.no_grad():
        assert alike()
    assert not alike()
    engine.destroy()


@in_turn("family", ["gpt2", "t5"])
def test_outputs_are_those_of_the_whole_model(family):
    """Their kinds, the number of hidden states, and what a cache holds."""
    engine, model = late(family, 1)
    given = {"input_ids": tokens(0, 0, 0), "output_hidden_states": True}
    if family == "t5":
        given["decoder_input_ids"] = tokens(1, 0, 0)
    kinds = []
    for asks in (True, False):
        model.train(asks)
        out = engine(**given).items()
        kinds.append({k: len(v) if isinstance(v, tuple) else v.__class__ for k, v in out})
    assert kinds[0] == kinds[1] and sum(left_out(LATE, probabilities(LATE, [DEPTH])))
    engine.destroy()


def test_classes_stay_what_they_are():
    model: Any = LayerDropJob("bert").build()
    keys = list(model.state_dict())
    engine = start(model, plain_sgd(model), config_of(0, **KEYS))
    layer = model.bert.encoder.layer[2]
    assert type(layer) is not BertLayer and isinstance(layer, BertLayer)
    assert type(layer).__name__ == "BertLayer" and type(layer).__module__ == BertLayer.__module__
    assert type(layer).forward is BertLayer.forward, "transformers asks by it whether to checkpoint"
    assert repr(layer).startswith("BertLayer(") and list(model.state_dict()) == keys
    assert type(copy.deepcopy(layer)) is BertLayer
    with pytest.raises(PartitionError, match="cannot be pickled whole"):
        pickle.dumps(layer)
    engine.destroy()
    assert type(layer) is type(pickle.loads(pickle.dumps(layer))) is BertLayer


# ---- backwards through forwards that have left out other blocks, each of two micro-batches ----


def older(net, model, rank, draw):
    """A graph of the first micro-batch has a part in the backward of the second."""
    draw(0)
    old = squared(net, At(0, 2, rank))
    yield squared(net, At(0, 0, rank))
    draw(1)
    yield squared(net, At(0, 1, rank)) + old


def evaluated(net, model, rank, draw):
    """A forward in eval mode, which runs all blocks, before one in training mode."""
    for micro in range(MICRO):
        draw(None)
        model.eval()
        whole = net(features(0, micro, rank))
        model.train()
        draw(micro)
        yield (whole * net(features(0, micro, rank))).pow(2).mean()


def alone(net, model, rank, draw):
    """All blocks called by themselves before the forward of the model."""
    for micro in range(MICRO):
        draw(None)
        x = floats(0, micro, rank, 3, 8)
        for block in model.blocks:
            x = block(x)
        draw(micro)
        yield x.pow(2).mean() + squared(net, At(0, micro, rank))


@in_turn(
    "losses, stage",
    [(older, 1), (older, 3), (evaluated, 2), (evaluated, 3), (alone, 0), (alone, 3)],
)
def test_a_backward_through_forwards_that_have_left_out_other_blocks(losses, stage):
    """A block that any of them uses is gathered and reduced."""

    def run(rank, model):
        engine = opened(model, stage, MICRO)
        engine.counters.global_steps = LATE
        for _ in range(2):
            for loss in losses(engine, model, rank, lambda micro: None):
                engine.backward(loss)
                engine.step()
        return full_weights(engine)

    plain: Any = small()
    optimizer, job = adamw(plain), LayerDropJob("stack")
    for step, rank in itertools.product((LATE, LATE + 1), range(2)):
        at = At(step, 0, rank)

        def draw(micro, at=at):
            for block in plain.blocks:
                vars(block).pop("forward", None)
            if micro is not None:
                job.by_hand(plain, replace(at, micro=micro))

        for loss in losses(plain, plain, rank, draw):
            (loss / 2 / MICRO).backward()
        if rank == 1:
            optimizer.step()
            optimizer.zero_grad()
    assert any(map(any, job.left_out.values()))
    close(on_ranks(2, run, build=small), plain)


# ---- what one rank alone runs ----


def logged(engine, model):
    squared(engine, At(9, 0, 0))


def explained(engine, model):
    x = features(9, 0, 0).requires_grad_()
    torch.autograd.grad(engine(x).pow(2).mean(), x)


def a_block(engine, model):
    model.blocks[DEPTH - 1](floats(9, 0, 0, 3, 8))


def in_eval_mode(engine, model):
    model.eval()
    squared(engine, At(9, 0, 0))
    model.train()


@in_turn(
    ("stage", "extra"),
    # a backward is reduced in the last micro-batch alone, at stages 0 and 1
    [(0, logged), (1, a_block), (2, in_eval_mode), (2, logged), (1, explained)],
)
def test_what_one_rank_alone_runs_changes_nothing_for_the_others(stage, extra):
    """A forward in training mode that is logged by rank 0, say: wherever it is in a step, blocks
    that are left out are those of plain PyTorch with the draws of the micro-batch.
    """

    def run(rank, model):
        engine = opened(model, stage, MICRO)
        at_work = itertools.cycle(range(3))
        for step, micro in itertools.product(range(6), range(MICRO)):
            runs = next(at_work) if rank == 0 and (micro == 0 or extra is not explained) else None
            if runs == 0:
                extra(engine, model)
            loss = squared(engine, At(step, micro, rank))
            if runs == 1:
                extra(engine, model)
            engine.backward(loss)
            if runs == 2 and extra is not explained:
                extra(engine, model)
            engine.step()
        return full_weights(engine)

    assert sum(map(sum, trained(run, by_itself, 6).values())) > 10


# ---- refusals ----


class Narrowing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width - 1)

    def forward(self, x):
        return self.layer(x)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Narrowing(width) for width in (7, 6, 5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@on_each_rank(1)
def test_what_cannot_be_left_out_is_refused(rank):
    with pytest.raises(ConfigError, match=r"layer_drop\.enabled concerns .* Sequential has"):
        opened(nn.Sequential(nn.Linear(4, 4)))
    engine = opened(Narrow(), 0)
    with pytest.raises(ConfigError, match="cannot leave out a Narrowing"):
        engine(features(0, 0, 0))
    engine.destroy()


@in_one_item(
    [
        ({"theta": 0.0}, {}, r"progressive_layer_drop\.theta"),
        ({"theta": 1.5}, {}, r"progressive_layer_drop\.theta"),
        ({"gamma": -0.1}, {}, r"progressive_layer_drop\.gamma"),
        ({"tehta": 0.5}, {}, r"progressive_layer_drop\.tehta.*theta"),
        (
            {},
            {"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}},
            "ignore_unused_parameters = False",
        ),
    ]
)
def test_mistakes_in_the_section(case):
    section, more, said = case
    with pytest.raises(ConfigError, match=said):
        ZeroConfig.from_dict({"progressive_layer_drop": {"enabled": True, **section}, **more})


def test_a_section_that_is_off_changes_nothing():
    model: Any = small()
    engine = opened(model, 0, progressive_layer_drop={"enabled": False, "theta": 0.2})
    assert type(model.blocks[0]) is Block and not engine.backward_pass.hooks.draws
    engine.destroy()
