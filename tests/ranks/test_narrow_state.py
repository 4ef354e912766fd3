"""Moments in bitsandbytes' 8 bits, and master weights and moments in bf16: conversions, reads and
writes of state. Bits at every stage, offloaded, and after a resume elsewhere are rows of
``test_capabilities.py``.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hf_zero
from hf_zero.checkpoint import convert_checkpoint, get_fp32_state_dict_from_zero_checkpoint
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops.host import Blocks
from hf_zero.optim import AdamW8bit, Lamb, OneBitAdam
from hf_zero.optim.bf16_state import Bf16State
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.zero.access.local import safe_get_local_fp32_param
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.flats import shard
from tests.helpers.models import seeded
from tests.helpers.plans import planned
from tests.helpers.stacks import on_ranks
from tests.optim.test_eight_bit import ADAM, TORCHAO, stand_in


def in_8_bits(params):
    return AdamW8bit(params, lr=1e-3, weight_decay=0.1)


WIDTH, HIDDEN, ROWS = 50, 90, 4


class Wide(nn.Module):
    """Two matrices of 4,500 elements, no whole number of blocks, between small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.up(x)))) * self.scale.mean()


def wide() -> nn.Module:
    return seeded(Wide)


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(net, step):
    dtype = next(getattr(net, "module", net).parameters()).dtype
    return net(batch(step).to(dtype)).float().pow(2).mean()


def run(engine, steps):
    """The same batch on each rank, so that the reduced gradient is that of one rank."""
    losses = []
    for step in steps:
        loss = loss_of(engine, step)
        engine.backward(loss)
        losses.append(float(loss.detach()))
        engine.step()
    return losses


def states(engine):
    names = {
        name for flat in engine.bound._table.flats for name in engine.bound.state.tensors(flat)
    }
    return {
        (name, key): hf_zero.safe_get_full_optimizer_state(p, key)
        for name, p in engine.module.named_parameters()
        for key in sorted(names - {"master"})
    }


def plainly(steps):
    """Weights, states and losses of one process without an engine."""
    model, losses = wide(), []
    optimizer = in_8_bits(model.parameters())
    for step in range(steps):
        loss = loss_of(model, step)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {
        (name, key): value.decode().view(p.shape) if isinstance(value, Blocks) else value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if key != "step"
    }
    return {name: p.detach() for name, p in model.named_parameters()}, found, losses


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name].view_as(value), value), name


FORMERS = {
    "fp32": (lambda params: AdamW8bit(params, lr=1e-3, optim_bits=32), {}),
    "larger": (lambda params: AdamW8bit(params, lr=1e-3, min_8bit_size=10_000), {}),
    "on the host": (
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        {"offload_optimizer": {"device": "cpu", "moments": "bf16"}},
    ),
}


@in_turn("former", FORMERS)
def test_a_load_keeps_the_formats_of_the_optimizer_that_loads(former, tmp_path):
    make, zero = FORMERS[former]

    def save(rank, model):
        config = config_of(2, zero_optimization={"stage": 2, **zero})
        engine = start(model, make(model.parameters()), config)
        run(engine, range(2))
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    def load(rank, model):
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        engine = start(model, optimizer, config_of(2))
        engine.load_checkpoint(tmp_path)
        run(engine, [2])
        group = optimizer.param_groups[0]
        assert group["lr"] == 1e-3
        assert (group["moments"], group["optim_bits"]) == ("dynamic8", 8)
        assert group["min_8bit_size"] == 4096
        # an engine that is built again reads the groups
        model.head.bias.requires_grad_(False)
        run(engine, [3])
        assert engine.bound._table.entries.names_in_8_bits == {"up.weight", "down.weight"}
        engine.destroy()

    on_ranks(2, save, build=wide)
    on_ranks(2, load, build=wide)


def test_runs_change_between_moments_in_8_bits_and_in_fp32(tmp_path):
    def in_fp32(params):
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)

    _, _, losses = plainly(6)

    def resume(rank, model, make, steps):
        engine = start(model, make(model.parameters()), config_of(2))
        if steps[0]:
            engine.load_checkpoint(tmp_path)
        found = states(engine) if steps[0] else {}
        assert run(engine, steps) == pytest.approx(losses[steps[0] : steps[-1] + 1], abs=0.01)
        engine.save_checkpoint(tmp_path)
        after = states(engine)
        engine.destroy()
        return found, after

    _, saved = on_ranks(2, resume, in_8_bits, range(2), build=wide)[0]
    loaded, saved_in_fp32 = on_ranks(2, resume, in_fp32, range(2, 4), build=wide)[0]
    assert_equal(loaded, saved)
    loaded, _ = on_ranks(4, resume, in_8_bits, range(4, 6), build=wide)[0]
    for (name, key), value in saved_in_fp32.items():
        coarse = value.abs().max() / 25 if name in ("up.weight", "down.weight") else 0.0
        assert (loaded[name, key] - value).abs().max() <= coarse, (name, key)


def test_a_state_dict_and_state_from_before_the_engine_go_on():
    weights, want, _ = plainly(4)

    def train(rank, model):
        optimizer = in_8_bits(model.parameters())
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine = start(model, optimizer, config_of(1))
        run(engine, [1])
        packed = optimizer.state_dict()
        assert all(
            torch.is_tensor(value) for held in packed["state"].values() for value in held.values()
        )
        run(engine, [2])
        optimizer.load_state_dict(optimizer.state_dict())
        run(engine, range(3, 4))
        assert_equal(states(engine), want)
        assert_equal(full_weights(engine), weights)
        engine.destroy()

    on_ranks(2, train, build=wide)


def test_other_offloaded_moments_are_refused():
    def train(rank, model):
        config = config_of(2)
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "moments": "int8"}
        with pytest.raises(UnsupportedOptimizerError, match=r"AdamW8bit.*moments is 'int8'"):
            start(model, in_8_bits(model.parameters()), config)
        assert isinstance(model.up.weight, nn.Parameter)

    on_ranks(1, train, build=wide)


KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}


def settings(stage, moments=False, **more):
    section = {"enabled": True, "bf16_optimizer_states": moments}
    section |= {"bf16_master_weights_and_grads": True, "stochastic_rounding_seed": 7}
    return config_of(stage, bf16=section, **more)


def resumed(rank, model, config, steps, source, target):
    """Weights and states before and after ``steps``."""
    engine = start(model, KINDS["adamw"](model.parameters()), config)
    if source is not None:
        engine.load_checkpoint(source)
    before = full_weights(engine), states(engine) if source is not None else {}
    run(engine, steps)
    engine.save_checkpoint(target)
    after = full_weights(engine), states(engine)
    engine.destroy()
    return before, after


def as_bf16(values):
    return {name: value.bfloat16().float() for name, value in values.items()}


def test_runs_change_between_bf16_and_fp32_and_conversions_read_both(tmp_path):
    narrow, full = settings(2, moments=True), config_of(3, bf16={"enabled": True})
    ends = {}
    for at, (world, config) in enumerate([(2, narrow), (4, full), (1, narrow)]):
        source = None if not at else tmp_path / str(at - 1)
        steps = range(2 * at, 2 * at + 2)
        target = tmp_path / str(at)
        got = on_ranks(world, resumed, config, steps, source, target, build=wide)[0]
        if at:  # fp32 holds numbers in bf16, which round those of fp32 to nearest
            for value, want in zip(got[0], ends[at - 1]):
                assert_equal({k: v.float() for k, v in value.items()}, as_bf16(want))
        ends[at] = got[1]
    assert open_checkpoint(tmp_path / "0/global_step2").manifest.version == 5
    assert open_checkpoint(tmp_path / "1/global_step4").manifest.version < 5
    weights, moments = ends[0]
    assert all(value.dtype == torch.bfloat16 for value in moments.values())
    assert any(bool((value != value.bfloat16()).any()) for value in ends[1][0].values())
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "0"), weights)
    for kind in ("universal", "dcp"):
        convert_checkpoint(tmp_path / "0", tmp_path / kind, to=kind)
        source, target = tmp_path / kind, tmp_path / f"{kind}2"
        got = on_ranks(2, resumed, narrow, [2], source, target, build=wide)[0]
        assert_equal(got[0][0], weights)
        assert_equal({k: v.float() for k, v in got[0][1].items()}, as_bf16(moments))


class Two(nn.Module):
    """On two ranks, only the first has elements of the small flat buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(2, 2), nn.Linear(50, 50)

    def forward(self, x):
        return self.large(x) * self.small(x[:, :2]).mean()


@in_turn("kind, stage", [("adagrad", 1), ("rprop", 3)])
def test_states_begin_with_the_same_numbers_in_every_tier(kind, stage):
    """Adagrad's and Rprop's begin with numbers that bf16 rounds."""
    make = {
        "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
        "rprop": partial(torch.optim.Rprop, lr=1e-3),
    }[kind]

    def train(rank, model, offloads):
        config = settings(stage, moments=True)
        if offloads:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine = start(model, make(model.parameters(), foreach=False), config)
        run(engine, range(2))
        found = states(engine)
        engine.destroy()
        return found

    here, away = (on_ranks(2, train, each, build=wide)[0] for each in (False, True))
    assert all(value.dtype == torch.bfloat16 for value in here.values())
    assert_equal(away, here)


@in_turn("offloads", [False, True])
def test_all_ranks_read_states_and_weights_in_one_dtype(offloads):
    """Also those without elements of a parameter; weights are read in fp32."""

    def train(rank, model):
        config = settings(3)
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_module_granularity_threshold": 0,
        }
        if offloads:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine = start(model, KINDS["sgd"](model.parameters()), config)
        run(engine, [0])
        weight = engine.module.small.weight
        found = hf_zero.safe_get_full_optimizer_state(weight, "momentum_buffer")
        whole = hf_zero.safe_get_full_fp32_param(weight)
        part = safe_get_local_fp32_param(weight)
        engine.destroy()
        return found, whole, part

    for found, whole, part in on_ranks(2, train, build=lambda: seeded(Two)):
        assert found.dtype == whole.dtype == part.dtype == torch.float32
        assert found.abs().sum() > 0


def test_torchaos_stochastic_rounding_asks_for_it():
    options = {**TORCHAO, "bf16_stochastic_round": True}
    cls = stand_in("torchao.optim.adam", "AdamW8bit", options, {**ADAM, "amsgrad": False})

    def train(rank, model):
        config = config_of(2, bf16={"enabled": True})
        engine = start(model, cls(model.parameters()), config)
        run(engine, range(2))
        held = {flat.optimizer_shard.master.dtype for flat in engine.sharded_model.trainable}
        engine.destroy()
        plan = planned(wide(), config, 2, lambda m: cls(m.parameters()), rank=rank)
        return held, {flat.spec.master_dtype for flat in plan.trainable}

    for held, foreseen in on_ranks(2, train, build=wide):
        assert held == foreseen == {torch.bfloat16}


REFUSED = {
    "8 bits": (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
        AdamW8bit,
        UnsupportedOptimizerError,
        "AdamW8bit keeps moments in 8 bits, and bf16.bf16_optimizer_states asks for bf16",
    ),
    "muon": ({}, partial(torch.optim.Muon, lr=1e-3), UnsupportedOptimizerError, "Muon needs whole"),
    "lamb": ({}, Lamb, UnsupportedOptimizerError, "Lamb needs whole tensors in fp32"),
    "one bit": (
        {},
        partial(OneBitAdam, freeze_step=2),
        ConfigError,
        "bf16_master_weights_and_grads.*do not go with",
    ),
    "updates": (
        {"compressed_communication": {"bits": 4}},
        torch.optim.AdamW,
        ConfigError,
        "do not go with steps that send changes in few bits",
    ),
}


@in_one_item(REFUSED)
def test_steps_that_need_fp32_are_refused(kind):
    more, make, error, match = REFUSED[kind]

    def train(rank, model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        with pytest.raises(error, match=match):
            start(model, make(matrices), {**settings(1), **more})
        assert isinstance(model.up.weight, nn.Parameter) and model.up.weight.shape == (90, 50)

    on_ranks(2, train, build=wide)


def kahan(stage, moments=False, **more):
    config = settings(stage, moments, **more)
    config["bf16"]["kahan_summation"] = True
    return config


def test_conversions_of_kahan_sums_are_read_by_runs_with_and_without_them(tmp_path):
    full = config_of(2, bf16={"enabled": True})
    source = tmp_path / "saved"
    weights, found = on_ranks(2, resumed, kahan(2), range(3), None, source, build=wide)[0][1]
    sums = {name: value + found[name, "compensation"] for name, value in weights.items()}
    for kind in ("universal", "dcp"):
        convert_checkpoint(source, tmp_path / kind, to=kind)
        for config, want in ((kahan(1), weights), (full, sums)):
            target = tmp_path / f"{kind}{want is sums}"
            got = on_ranks(2, resumed, config, [3], tmp_path / kind, target, build=wide)[0][0]
            assert_equal(got[0], want)


@in_turn("stage", [1, 3])
def test_state_dicts_of_torch_have_kahan_sums(stage):
    """Also that of a new engine; without Kahan sums a run loads the rest."""

    def train(rank, models):
        model, target = models
        engine = start(model, KINDS["adamw"](model.parameters()), kahan(stage))
        new = get_state_dict(model, engine.optimizer)[1]
        run(engine, range(2))
        weights, content = copy.deepcopy(get_state_dict(model, engine.optimizer))
        entries = [
            {
                (name, kind): (value.dtype, value.shape)
                for name, state in found["state"].items()
                for kind, value in state.items()
            }
            for found in (new, content)
        ]
        assert ("up.weight", "compensation") in entries[0] and entries[0] == entries[1]
        want, whole = states(engine), full_weights(engine)
        engine.destroy()
        full = config_of(stage, bf16={"enabled": True})
        engine = start(target, KINDS["adamw"](target.parameters()), full)
        set_state_dict(target, engine.optimizer, model_state_dict=weights, optim_state_dict=content)
        kept = {key: value.float() for key, value in want.items() if key[1] != "compensation"}
        assert_equal({key: value.float() for key, value in states(engine).items()}, kept)
        assert_equal(full_weights(engine), whole)
        run(engine, [2])
        engine.destroy()

    on_ranks(2, train, build=lambda: (wide(), wide()))


@in_turn("stage", [1, 3])
def test_kahan_sums_forget_the_errors_of_values_that_a_script_replaces(stage):
    def train(rank, model):
        engine = start(model, KINDS["sgd"](model.parameters()), kahan(stage))
        run(engine, range(2))
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        weight = engine.module.up.weight
        with hf_zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.zero_()
        run(engine, [2])
        found = full_weights(engine)["up.weight"]
        engine.destroy()
        return found

    for found in on_ranks(2, train, build=wide):
        assert not found.any()


def test_copies_of_pipeline_stages_are_rounded_alike_whatever_their_names():
    values = torch.randn(50, 90, generator=torch.Generator().manual_seed(0))
    ends = {}
    for name, stages in (("embed", ()), ("head", ()), ("embed", (0, 1)), ("head", (0, 1))):
        (flats,) = shard([{name: values.bfloat16()}], 1, together=True)
        flats[0].master = flats[0].master.bfloat16()
        flats[0].tied_pp_stages = stages
        parameter = nn.Parameter(values)
        optimizer = torch.optim.SGD([parameter], lr=1e-3)
        state = Bf16State(masters=True, moments=False)
        bound = BoundOptimizer(optimizer, flats, {name: 0}, {name: parameter}, bf16=state)
        flats[0].gradient.shard.fill_(1.0)
        bound.step(steps_before=3)
        ends[name, stages] = flats[0].master
    assert torch.equal(ends["embed", (0, 1)], ends["head", (0, 1)])
    assert not torch.equal(ends["embed", ()], ends["head", ()])
