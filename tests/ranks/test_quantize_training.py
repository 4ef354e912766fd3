"""Weights in bits that fall (MoQ): what ranks that are threads train is what a plain loop trains
that rounds the fp32 weights before each forward and gives the gradients to them as they are. Kinds
of rounding, resumes and overflows are rows of ``test_capabilities.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, PartitionError
from tests.helpers import oracle
from tests.helpers.capabilities_of_techniques import MOQ, RoundedJob
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, engine_opener, start, train_on_threads
from tests.helpers.models import Stack, features, gpt2, seeded, tokens
from tests.helpers.stacks import on_each_rank, run_steps, squared, stack
from tests.helpers.training import At, Plan, sgd

STEPS = 4  # in 32, 6, 5 and 4 bits


def check(job, plan, stage, **more):
    more = {"quantize_training": job.section, **more}
    got = train_on_threads(job, plan, engine_opener(stage, **more))
    oracle.compare(got, oracle.run(job, plan), weight_floor=oracle.ROUNDING)


class Causal(RoundedJob):
    def loss_of(self, net, at):
        ids = tokens(at.step, at.micro, at.rank)
        return net(input_ids=ids, labels=ids).loss


@in_turn(
    ("stage", "more"),
    [
        (1, {"offload_optimizer": "cpu"}),
        (3, {"activation_checkpointing": {"blocks": True}}),
        (3, {"compile": {"blocks": True, "backend": "eager"}}),
    ],
)
def test_trains_a_model_of_transformers(stage, more):
    """Blocks that are recomputed see what their forward saw."""
    check(Causal(MOQ, gpt2), Plan(2, STEPS), stage, **more)


class Mixed(Stack):
    """Its blocks have weights of two sizes."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(32, 96), nn.Linear(96, 32)
            block.norm = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))


class Sharing(Stack):
    """Two of its blocks have a weight in common, which is the root's to gather."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight


@in_turn(
    ("model", "ranks", "stage", "more"),
    [
        # some blocks' weights stay whole, others are sharded
        (Mixed, 2, 3, {"stage3_param_persistence_threshold": 2048}),
        (Sharing, 2, 3, {}),
        (Stack, 4, 3, {"zero_hpz_partition_size": 2}),
        (Stack, 2, 3, {"offload_param": {"device": "cpu"}}),
    ],
)
def test_which_weights_are_where(model, ranks, stage, more):
    zero = {"stage": stage, **more}
    check(RoundedJob(MOQ, model), Plan(ranks, STEPS), stage, zero_optimization=zero)


def at_once(**more):
    """Three bits from the first step on."""
    return {
        "enabled": True,
        "quantize_bits": {"start_bits": 3, "target_bits": 3},
        "quantize_schedule": {"schedule_offset": 0},
        **more,
    }


def levels(weight):
    return len(weight.unique())


@in_turn("stage, precision", [(0, "bf16"), (1, "fp32"), (3, "bf16")])
@on_each_rank(2)
def test_only_modules_see_few_bits(rank, model, stage, precision):
    """State dicts, scripts between passes and GatheredParameters have the values as they are."""
    name, plan = "blocks.1.up.weight", Plan(precision=precision)
    engine = start(model, sgd(model), config_of(stage, plan, quantize_training=at_once()))
    linear, seen = engine.module.get_submodule("blocks.1.up"), []
    linear.register_forward_hook(lambda *_: seen.append(linear.weight.detach().clone()))
    x = features(0, 0, rank).to(plan.dtype)
    wanted = stack().state_dict()[name]

    def evaluated():
        with torch.no_grad():
            engine(x)
        return seen[-1]

    evaluated()
    loss = engine(x).float().pow(2).mean()
    assert levels(seen[0]) <= 8 and torch.equal(seen[0], seen[1])
    between = engine.state_dict()[name].float().clone()
    assert (between - wanted).norm() < 1e-2 * wanted.norm() and levels(between) > 100
    with hf_zero.GatheredParameters([linear.weight]):
        assert torch.equal(linear.weight.detach().float().cpu(), between)
        assert torch.equal(evaluated(), seen[0])
        assert torch.equal(linear.weight.detach().float().cpu(), between)
    engine.backward(loss)
    with hf_zero.GatheredParameters([linear.weight], modifier_rank=0):
        linear.weight.data.mul_(2.0)
    assert torch.equal(evaluated(), 2 * seen[0])
    assert torch.equal(engine.state_dict()[name].float(), 2 * between)
    if stage < 3:
        linear.weight.data.mul_(0.5)
        assert torch.equal(evaluated(), seen[0])
    engine.destroy(gather=True)
    assert levels(linear.weight) > 100


@in_turn("stage", [1, 3])
@on_each_rank(1)
def test_a_module_that_writes_to_its_weight_and_torch_func_are_refused(rank, model, stage):
    """The latter would see the weights as they are."""
    engine = start(model, sgd(model), config_of(stage, quantize_training=at_once()))
    x, linear = features(0, 0, rank), engine.module.get_submodule("blocks.0.up")
    with pytest.raises(PartitionError, match=r"torch\.func"):
        torch.func.grad(lambda x: engine(x).sum())(x)
    engine.backward(squared(engine, At(0, 0, rank)))
    engine.step()

    def clamp(*_):
        with torch.no_grad():
            linear.weight.clamp_(-0.1, 0.1)

    handle = linear.register_forward_pre_hook(clamp)
    with pytest.raises(PartitionError, match=r"blocks\.0\.up\.weight"), torch.no_grad():
        engine(x)
    handle.remove()
    engine.destroy(gather=True)
    torch.func.grad(lambda x: model(x).sum())(x)


def groups(shared=None, **each):
    shared = {"schedule_offset": 1, "quantize_groups": 2, **(shared or {})}
    return {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, **shared},
            "different_groups": each,
        }
    }


def test_groups_of_modules():
    """What patterns name, in blocks or not."""
    params = {"start_bits": 6, "target_bits": 4, "quantization_period": 1}
    section = groups(
        one={"params": params, "modules": [r"blocks\.1", "head"]},
        two={"params": params, "modules": ["up"]},
    )
    job = RoundedJob(MOQ, chosen=lambda name: name.startswith(("blocks.1", "head")) or "up" in name)
    plan = Plan(2, STEPS)
    got = train_on_threads(job, plan, engine_opener(3, compression_training=section))
    oracle.compare(got, oracle.run(job, plan), weight_floor=oracle.ROUNDING)


def bits_of(model, **section):
    """The bits of each weight under an engine of ``model``."""
    engine = start(model, sgd(model), config_of(0, compression_training=groups(**section)))
    bits = engine.feature_set.by_name["weight_quantization"].bits()
    engine.destroy()
    return bits


def test_which_weights_a_group_names():
    """A tied one by any of its modules; bits in the forward are the last ones at once."""
    params, at_once = {"start_bits": 8, "target_bits": 3}, {"schedule_offset": 0}
    tied = bits_of(seeded(gpt2), shared=at_once, one={"params": params, "modules": ["lm_head"]})
    assert tied == {"transformer.wte.weight": 8}
    shared = {**at_once, "quantize_weight_in_forward": True}
    bits = bits_of(stack(), shared=shared, one={"params": params, "modules": "*"})
    assert set(bits.values()) == {3} and "head.weight" in bits and "head.bias" not in bits


PARAMS = {"start_bits": 8, "target_bits": 4}


def of_group(**group):
    return {"compression_training": groups(a=group)}


@in_one_item(
    [
        ({"quantize_training": at_once(quantize_groups=7)}, "quantize_groups = 7"),
        (
            {"quantize_training": at_once(quantize_bits={"start_bits": 4, "target_bits": 8})},
            "target_bits = 8",
        ),
        ({"compression_training": groups()}, "different_groups is empty"),
        (of_group(params={"start_bits": 8}), r"different_groups\.a\.params lacks"),
        (of_group(params={"start_bits": 8, "target_bits": 1}), "target_bits = 1"),
        (of_group(params={"start_bits": "8", "target_bits": 1}), "must be integers"),
        (of_group(params=PARAMS, modules=["attention"]), "no weight that trains"),
        (of_group(params=PARAMS, modules=["("]), "are no patterns"),
        (of_group(params=PARAMS, module=["*"]), "module is not a key"),
        ({"quantize_training": at_once(), **of_group(params=PARAMS)}, "keep one"),
    ]
)
def test_refuses(case):
    more, said = case
    model = stack()
    with pytest.raises(ConfigError, match=said):
        start(model, sgd(model), config_of(1, **more))


def test_logs_each_fall_of_a_bit(caplog):
    model = stack()
    config = config_of(1, quantize_training={**MOQ, "quantize_verbose": True})
    with caplog.at_level("INFO", logger="hf_zero"):
        run_steps(engine := start(model, sgd(model), config), 0, range(STEPS))
    engine.destroy()
    said = [line for line in caplog.messages if "weights in" in line]
    assert said == [f"quantize_training: weights in {bits} bits" for bits in (6, 5, 4)]


@in_turn("stage", [0, 2, 3])
@on_each_rank(1)
def test_a_refused_write_leaves_no_other_weight_in_few_bits(rank, model, stage):
    engine = start(model, sgd(model), config_of(stage, quantize_training=at_once()))
    x, linear = features(0, 0, rank), engine.module.get_submodule("blocks.0.up")

    def write(module, args):
        with torch.no_grad():
            module.weight[0, 0] = 5.0

    before = {name: values.clone() for name, values in engine.state_dict().items()}
    handle = linear.register_forward_pre_hook(write)
    with pytest.raises(PartitionError, match=r"was written to"):
        engine.backward(engine(x).square().mean())
    handle.remove()
    engine.zero_grad()
    for name, values in engine.state_dict().items():
        assert name == "blocks.0.up.weight" or torch.equal(values, before[name]), name
