"""Weights in bits that fall (MoQ): what ranks that are threads train is what a plain loop trains
that rounds the fp32 weights before each forward and gives the gradients to them as they are.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.planning.needs import needs
from hf_zero.techniques.quantization import noise_for
from tests.helpers.engines import config_of as configured
from tests.helpers.engines import full_weights, start
from tests.helpers.models import Stack, features, gpt2, seeded, tokens
from tests.helpers.plans import planned
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, sgd

STEPS = 6
SECTION: dict[str, Any] = {
    "enabled": True,
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 2,
}
BITS = [None, 6, 5, 4, 4, 4]  # of each step's forwards


SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}


class Mixed(Stack):
    """Its blocks have weights of two sizes."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(32, 96), nn.Linear(96, 32)
            block.norm = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))


def config_of(stage, plan=None, **more):
    """At stage 3 with every parameter sharded, however small."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return configured(stage, plan, **{"zero_optimization": zero, **more})


def rounded(name, weight, step, section):
    """The definition, group by group."""
    bits = BITS[step]
    if bits is None:
        return weight
    levels, found = 2**bits, []
    stochastic = section.get("quantize_rounding") == "stochastic"
    noise = noise_for(weight, name, 0, step - 1).flatten()
    parts = weight.flatten().chunk(section["quantize_groups"])
    for part, drawn in zip(parts, noise.chunk(section["quantize_groups"])):
        symmetric = section.get("quantize_type", "symmetric") == "symmetric"
        shift = 0.0 if symmetric else part.min()
        span = 2 * part.abs().max() if symmetric else part.max() - part.min()
        low = -levels // 2 if symmetric else 0
        scaled = (part - shift) * (levels / span)
        whole = torch.floor(scaled + drawn) if stochastic else torch.round(scaled)
        found.append(whole.clamp(low, low + levels - 1) * (span / levels) + shift)
    value = torch.cat(found).view(weight.shape)
    mixed = section.get("fp16_mixed_quantize", {"enabled": False})
    if mixed["enabled"]:
        since = step - BITS.index(bits)
        share = max(0.0, 1 - mixed["quantize_change_ratio"] * since)
        value = share * weight + (1 - share) * value
    return value


def distance(a, b):
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def in_blocks(name):
    return name.startswith(("blocks.", "transformer.h."))


def by_hand(build, loss_of, section, ranks=1, accumulation=1, chosen=in_blocks):
    model = build()
    optimizer, losses = sgd(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks):
            for micro in range(accumulation):
                weights = {
                    name: p + (rounded(name, p.detach(), step, section) - p.detach())
                    if chosen(name) and p.dim() > 1
                    else p
                    for name, p in model.named_parameters()
                }
                loss = loss_of(
                    lambda *a, _w=weights, **k: functional_call(model, _w, a, k),
                    At(step, micro, rank),
                ) / (ranks * accumulation)
                loss.backward()
                total += loss.item()
        optimizer.step()
        losses.append(total)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses


def trained(rank, model, config, loss_of, accumulation=1, steps=range(STEPS), folder=None):
    engine = start(model, sgd(model), config)
    assert engine.schedule.has_sharded_units is (engine.stage == 3)
    if folder is not None and steps.start:
        engine.load_checkpoint(str(folder))
    losses = []
    for step in steps:
        total = 0.0
        for micro in range(accumulation):
            loss = loss_of(engine, At(step, micro, rank))
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        losses.append(total)
    weights = full_weights(engine)
    if folder is not None and not steps.start:
        engine.save_checkpoint(str(folder))
    engine.destroy()
    return weights, losses


def causal(net, at):
    ids = tokens(at.step, at.micro, at.rank)
    return net(input_ids=ids, labels=ids).loss


def check(answers, wanted):
    weights, losses = wanted
    for name, value in weights.items():
        assert distance(answers[0][0][name], value) < 1e-5, name
    for step, loss in enumerate(losses):
        mean = sum(answer[1][step] for answer in answers) / len(answers)
        assert math.isclose(mean, loss, rel_tol=1e-5), step


@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (4, 2)])
def test_trains_as_the_plain_loop(stage, ranks, accumulation):
    config = config_of(stage, Plan(accumulation=accumulation), quantize_training=SECTION)
    answers = on_ranks(ranks, trained, config, squared, accumulation)
    check(answers, by_hand(stack, squared, SECTION, ranks, accumulation))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {"quantize_type": "asymmetric"},
        {"quantize_rounding": "stochastic"},
        {"quantize_type": "asymmetric", "quantize_rounding": "stochastic", "quantize_groups": 8},
        {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}},
    ],
    ids=str,
)
def test_kinds_of_rounding(stage, more):
    section = {**SECTION, **more}
    config = config_of(stage, quantize_training=section)
    check(on_ranks(2, trained, config, squared), by_hand(stack, squared, section, 2))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        {"offload_optimizer": "cpu"},
        {"activation_checkpointing": {"blocks": True}},
        {"compile": {"blocks": True, "backend": "eager"}},
    ],
    ids=str,
)
def test_trains_a_model_of_transformers(stage, more):
    """Blocks that are recomputed see what their forward saw."""
    build = lambda: seeded(gpt2)  # noqa: E731
    config = config_of(stage, quantize_training=SECTION, **more)
    answers = on_ranks(2, trained, config, causal, build=build)
    check(answers, by_hand(build, causal, SECTION, 2))


@pytest.mark.parametrize(("stage", "ranks", "later"), [(1, 2, 1), (3, 2, 3), (2, 1, 2)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_goes_on_from_a_checkpoint(stage, ranks, later, rounding, tmp_path):
    """After a save in the middle, on another number of ranks, each of which sees all batches."""
    section = {**SECTION, "quantize_rounding": rounding}
    config = config_of(stage, quantize_training=section)
    same = lambda net, at: squared(net, At(at.step, 0, 0))  # noqa: E731
    on_ranks(ranks, trained, config, same, 1, range(3), tmp_path)
    answers = on_ranks(later, trained, config, same, 1, range(3, STEPS), tmp_path)
    weights, losses = by_hand(stack, same, section)
    check([(found, losses[:3] + rest) for found, rest in answers], (weights, losses))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_goes_back_to_before_the_offset(stage, tmp_path):
    """A checkpoint loaded into the engine that wrote it: weights as they are until the offset."""

    def run(rank, model):
        engine = start(model, sgd(model), config_of(stage, quantize_training=SECTION))
        engine.save_checkpoint(str(tmp_path / str(stage)))
        runs = []
        for _ in range(2):
            losses = []
            for step in range(STEPS):
                loss = squared(engine, At(step, 0, rank))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            runs.append(losses)
            engine.load_checkpoint(str(tmp_path / str(stage)))
            assert engine.techniques.by_key["quantize_training"].bits() == {}
        return runs

    for first, again in on_ranks(2, run):
        assert first == again


def test_small_weights_that_stay_whole_at_stage_3():
    """Some blocks' weights are persistent, others sharded."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 2048}
    config = config_of(3, zero_optimization=zero, quantize_training=SECTION)
    build = lambda: seeded(lambda: Mixed())  # noqa: E731
    check(on_ranks(2, trained, config, squared, build=build), by_hand(build, squared, SECTION, 2))


@pytest.mark.parametrize(
    "more",
    [
        {"replicate_size": 2},
        {"zero_optimization": {**SHARDED, "zero_hpz_partition_size": 2}},
        {"zero_optimization": {**SHARDED, "offload_param": {"device": "cpu"}}},
    ],
    ids=str,
)
def test_ways_of_stage_3(more):
    config = config_of(3, **{"quantize_training": SECTION, **more})
    check(on_ranks(4, trained, config, squared), by_hand(stack, squared, SECTION, 4))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sends_the_bytes_of_training_without(stage):
    def sent(rank, model, config):
        engine = start(model, sgd(model), config)
        engine.mesh.stats.keep_log = True
        run_steps(engine, rank, range(STEPS))
        return list(engine.mesh.stats.log)

    plain = on_ranks(2, sent, config_of(stage))
    assert on_ranks(2, sent, config_of(stage, quantize_training=SECTION)) == plain
    assert plain[0]


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_each_rank(2)
def test_only_modules_see_few_bits(rank, model, stage, precision):
    """State dicts, scripts between passes and GatheredParameters have the values as they are."""
    name = "blocks.1.up.weight"
    config = config_of(stage, Plan(precision=precision), quantize_training=at_once())
    engine = start(model, sgd(model), config)
    seen = []
    linear = engine.module.get_submodule("blocks.1.up")
    linear.register_forward_hook(lambda *_: seen.append(linear.weight.detach().clone()))
    x = features(0, 0, rank).to(Plan(precision=precision).dtype)
    wanted = stack().state_dict()[name]
    with torch.no_grad():
        engine(x)
    loss = engine(x).float().pow(2).mean()
    assert levels(seen[0]) <= 8 and torch.equal(seen[0], seen[1])
    between = engine.state_dict()[name].float().clone()
    assert distance(between, wanted) < 1e-2 and levels(between) > 100
    with hf_zero.GatheredParameters([linear.weight]):
        assert torch.equal(linear.weight.detach().float().cpu(), between)
        with torch.no_grad():
            engine(x)
        assert torch.equal(seen[-1], seen[0])
        assert torch.equal(linear.weight.detach().float().cpu(), between)
    engine.backward(loss)
    with hf_zero.GatheredParameters([linear.weight], modifier_rank=0):
        linear.weight.data.mul_(2.0)
    with torch.no_grad():
        engine(x)
    assert torch.equal(seen[-1], 2 * seen[0])
    assert torch.equal(engine.state_dict()[name].float(), 2 * between)
    if stage < 3:
        linear.weight.data.mul_(0.5)
        with torch.no_grad():
            engine(x)
        assert torch.equal(seen[-1], seen[0])
    engine.destroy(gather=True)
    assert levels(linear.weight) > 100


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_that_writes_to_its_weight_is_refused(stage):
    class Writes(Stack):
        def forward(self, x):
            y = super().forward(x)
            return y

    def run(rank, model):
        engine = start(model, sgd(model), config_of(stage, quantize_training=at_once()))
        linear = engine.module.get_submodule("blocks.0.up")

        def clamp(*_):
            with torch.no_grad():
                linear.weight.clamp_(-0.1, 0.1)

        linear.register_forward_pre_hook(clamp)
        said = re.escape("blocks.0.up.weight was written to in a forward")
        with pytest.raises(PartitionError, match=said), torch.no_grad():
            engine(features(0, 0, rank))

    on_ranks(1, run, build=lambda: seeded(Writes))


@on_each_rank(1)
def test_torch_func_is_refused(rank, model):
    """It would see the weights as they are."""
    engine = start(model, sgd(model), config_of(1, quantize_training=at_once()))
    x = features(0, 0, rank)
    with pytest.raises(PartitionError, match=r"torch\.func goes through .* in fewer bits"):
        torch.func.grad(lambda x: engine(x).sum())(x)
    engine.backward(squared(engine, At(0, 0, rank)))
    engine.destroy()
    torch.func.grad(lambda x: model(x).sum())(x)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bytes_are_those_of_the_estimate(stage):
    """Stages 0 to 2 hold the blocks twice, stage 3 nothing more."""
    section = {"quantize_training": at_once()}
    config = ZeroConfig.from_dict(config_of(stage, **section))

    def held(rank, model, config):
        engine = start(model, sgd(model), config)
        return engine.state_bytes()["parameters"]

    found = on_ranks(2, held, config)[0]
    wanted = sum(
        row.nbytes
        for row in needs(planned(stack(), config, 2)).device
        if row.what in ("parameters", "rounded weights")
    )
    assert found == wanted
    plain = ZeroConfig.from_dict(config_of(stage))
    assert (on_ranks(2, held, plain)[0] == found) is (stage == 3)


def groups(**each):
    return {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 1, "quantize_groups": 2},
            "different_groups": each,
        }
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_of_modules(stage):
    """``compression_training``: what its patterns name, in blocks or not."""
    params = {"start_bits": 6, "target_bits": 4, "quantization_period": 1}
    section = groups(
        one={"params": params, "modules": [r"blocks\.1", "head"]},
        two={"params": params, "modules": ["up"]},
    )
    config = config_of(stage, compression_training=section)

    def chosen(name):
        return name.startswith(("blocks.1", "head")) or "up" in name

    wanted = by_hand(stack, squared, SECTION, 2, chosen=chosen)
    check(on_ranks(2, trained, config, squared), wanted)


def test_a_tied_weight_is_named_by_any_of_its_modules():
    params = {"start_bits": 8, "target_bits": 3}
    section = groups(one={"params": params, "modules": ["lm_head"]})
    section["weight_quantization"]["shared_parameters"]["schedule_offset"] = 0
    model = seeded(gpt2)
    engine = start(model, sgd(model), config_of(0, compression_training=section))
    assert engine.techniques.by_key["weight_quantization"].bits() == {"transformer.wte.weight": 8}
    engine.destroy()


def test_bits_in_the_forward():
    params = {"start_bits": 8, "target_bits": 3}
    section = groups(one={"params": params, "modules": "*"})
    section["weight_quantization"]["shared_parameters"]["quantize_weight_in_forward"] = True
    section["weight_quantization"]["shared_parameters"]["schedule_offset"] = 0
    model = stack()
    engine = start(model, sgd(model), config_of(0, compression_training=section))
    technique = engine.techniques.by_key["weight_quantization"]
    assert set(technique.bits().values()) == {3}
    assert "head.weight" in technique.bits() and "head.bias" not in technique.bits()
    engine.destroy()


PARAMS = {"start_bits": 8, "target_bits": 4}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"quantize_training": at_once(quantize_groups=7)}, "quantize_groups = 7 does not divide"),
        (
            {"quantize_training": at_once(quantize_bits={"start_bits": 4, "target_bits": 8})},
            "target_bits = 8 is more than start_bits = 4",
        ),
        ({"compression_training": groups()}, "different_groups is empty"),
        (
            {"compression_training": groups(a={"params": {"start_bits": 8}})},
            "different_groups.a.params lacks",
        ),
        (
            {"compression_training": groups(a={"params": {"start_bits": 8, "target_bits": 1}})},
            "target_bits = 1 leaves a sign",
        ),
        (
            {"compression_training": groups(a={"params": {"start_bits": "8", "target_bits": 1}})},
            "must be integers",
        ),
        (
            {"compression_training": groups(a={"params": PARAMS, "modules": ["attention"]})},
            "no weight that trains is in a module",
        ),
        (
            {"compression_training": groups(a={"params": PARAMS, "modules": ["("]})},
            "are no patterns of names",
        ),
        (
            {"compression_training": groups(a={"params": PARAMS, "module": ["*"]})},
            "module is not a key of weight quantization",
        ),
        (
            {"quantize_training": at_once(), "compression_training": groups(a={"params": PARAMS})},
            "both quantize weights; keep one",
        ),
    ],
)
def test_refuses(more, said):
    model = stack()
    with pytest.raises(ConfigError, match=said):
        start(model, sgd(model), config_of(1, **more))


def test_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.Linear(7, 5))
    with pytest.raises(ConfigError, match="this model has no block with a weight that trains"):
        start(model, sgd(model), config_of(1, quantize_training=at_once()))


def test_logs_each_fall_of_a_bit(caplog):
    section = {**SECTION, "quantize_verbose": True}
    model = stack()
    with caplog.at_level("INFO", logger="hf_zero"):
        trained(0, model, config_of(1, quantize_training=section), squared)
    said = [line for line in caplog.messages if "weights in" in line]
    assert said == [f"quantize_training: weights in {bits} bits" for bits in (6, 5, 4)]


class Sharing(Stack):
    """Two of its blocks have a weight in common, which is the root's to gather."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_that_blocks_share(stage):
    def build():
        return seeded(Sharing)

    answers = on_ranks(
        2, trained, config_of(stage, quantize_training=SECTION), squared, build=build
    )
    check(answers, by_hand(build, squared, SECTION, 2))


class Headed(Stack):
    """Its head is large enough to be a unit of its own, and is no block."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(self.head.in_features, 1 << 14)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_large_head_is_no_block(stage):
    model = seeded(Headed)
    engine = start(model, sgd(model), config_of(stage, quantize_training=at_once()))
    assert len(engine.units) > 1 and engine.units[-1].label == "head"
    technique = engine.techniques.by_key["quantize_training"]
    assert {*technique.bits()} == {
        f"blocks.{number}.{name}.weight" for number in range(3) for name in ("up", "down")
    }
    engine.destroy()
