"""Master weights and moments in bf16, rounded stochastically: the bits of plain torch with the same
rounding, on any number of ranks, at every stage, in every tier, and after a resume elsewhere.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hf_zero
from hf_zero.checkpoint import convert_checkpoint, get_fp32_state_dict_from_zero_checkpoint
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops import reference
from hf_zero.optim import AdamW8bit, Lamb, OneBitAdam, bf16_state
from hf_zero.optim.bf16_state import Bf16State, key_of
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.planning.needs import state_bytes
from hf_zero.zero.access.local import safe_get_local_fp32_param
from hf_zero.zero.state_bytes import held_bytes
from tests.helpers.cells import fast, in_one_item
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.flats import shard
from tests.helpers.models import seeded
from tests.helpers.plans import planned
from tests.helpers.stacks import on_ranks
from tests.optim.test_eight_bit import ADAM, TORCHAO, stand_in
from tests.ranks.test_eight_bit import assert_equal, batch, states, wide

KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adamw8bit": lambda params: AdamW8bit(params, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
}
STEPS, SEED, BF16 = 5, 7, torch.bfloat16
FP32 = {"enabled": True}  # master weights and moments in fp32


def settings(stage, moments=False, masters=True, **more):
    section = {"enabled": True, "bf16_optimizer_states": moments}
    section |= {"bf16_master_weights_and_grads": masters, "stochastic_rounding_seed": SEED}
    return config_of(stage, bf16=section, **more)


def loss_of(net, step):
    return net(batch(step).bfloat16()).float().pow(2).mean()


def run(engine, steps):
    """The same batch on each rank, so that the reduced gradient is that of one rank."""
    for step in steps:
        engine.backward(loss_of(engine, step))
        engine.step()


def rounded(values, name, state, step):
    """``values`` in bf16: up if the cut-off 16 bits and 16 random ones carry."""
    random = reference.random_bits(key_of(SEED, name, state, step), 0, values.numel())
    bits = values.reshape(-1).view(torch.int32).long() + (random & 0xFFFF)
    return (bits >> 16 << 16).to(torch.int32).view(torch.float32).view(values.shape)


def plainly(kind, moments=False, steps=range(STEPS)):
    """Weights and states of one process without an engine: a model in bf16, whose weights an
    optimizer in fp32 steps.
    """
    model = wide().bfloat16()
    named = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    optimizer = KINDS[kind](masters.values())
    for step in steps:
        loss_of(model, step).backward()
        for name, p in named.items():
            masters[name].grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(rounded(master, name, "master", step))
                named[name].copy_(master)
                for state, value in optimizer.state[master].items() if moments else ():
                    if state != "step":
                        value.copy_(rounded(value, name, state, step))
    found = {
        (name, state): value.decode().view(master.shape) if hasattr(value, "decode") else value
        for name, master in masters.items()
        for state, value in optimizer.state[master].items()
        if state != "step"
    }
    return {name: p.detach() for name, p in masters.items()}, found


@pytest.mark.turns
@pytest.mark.parametrize("world", [2, 1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_number_of_ranks_has_the_bits_of_one_process(stage, world, monkeypatch):
    """Also of segments that are widened in batches."""
    monkeypatch.setattr(bf16_state, "WIDENED", 1024)
    kind, moments = list(KINDS)[stage], stage % 2 == 1
    weights, want = plainly(kind, moments)

    def train(rank, model):
        engine = start(model, KINDS[kind](model.parameters()), settings(stage, moments))
        run(engine, range(STEPS))
        assert_equal(full_weights(engine), weights)
        found = states(engine)
        assert_equal({key: value.float() for key, value in found.items()}, want)
        dtypes = {flat.optimizer_shard.master.dtype for flat in engine.sharded_model.trainable}
        assert dtypes == {torch.bfloat16}
        engine.destroy()

    on_ranks(world, train, build=wide)


OFFLOADED = [
    ("adamw", "cpu", False),
    ("adamw", "nvme", True),
    ("sgd", "cpu", True),
    ("adamw8bit", "nvme", False),
]
MORE = [("adamw", "nvme", False), ("adamw", "cpu", True), ("sgd", "nvme", True)]
MORE += [("sgd", "cpu", False), ("sgd", "nvme", False), ("adamw8bit", "cpu", False)]


@pytest.mark.parametrize("kind, device, moments", fast(OFFLOADED + MORE, lambda *c: c in OFFLOADED))
def test_offloaded_state_has_the_bits_of_the_device(kind, device, moments, tmp_path):
    """Also where it resumes on another number of ranks, on the device and offloaded."""
    weights, want = plainly(kind, moments)
    stage = 1 + list(KINDS).index(kind) % 3
    section = {"device": device, "buffer_size": 1000}
    section |= {"nvme_path": str(tmp_path)} if device == "nvme" else {}

    def train(rank, model, steps, offloads, saved):
        config = settings(stage, moments)
        if offloads:
            config["zero_optimization"] |= {"offload_optimizer": section, "sub_group_size": 1000}
        engine = start(model, KINDS[kind](model.parameters()), config)
        if steps[0]:
            engine.load_checkpoint(tmp_path / saved)
        run(engine, steps)
        engine.save_checkpoint(tmp_path / f"after{steps[-1]}")
        found, held = (states(engine), full_weights(engine)), held_bytes(engine)
        world = engine.mesh.world
        engine.destroy()
        plan = planned(wide(), config, world, lambda m: KINDS[kind](m.parameters()), rank=rank)
        foreseen = sum((plan.optimizer_bytes(flat) for flat in plan.flats), Counter())
        assert all(held["optimizer", tier] == foreseen[tier] for tier in ("device", "ram", "disk"))
        return found

    on_ranks(2, train, range(2), True, "", build=wide)
    on_ranks(4, train, range(2, 3), False, "after1", build=wide)
    for found, whole in on_ranks(1, train, range(3, STEPS), True, "after2", build=wide):
        assert_equal(whole, weights)
        for key, value in found.items():  # the host's kernel rounds fp32 moments of AdamW last
            off = 0.0 if moments or kind != "adamw" else 1e-6 * float(want[key].abs().max())
            torch.testing.assert_close(value.float(), want[key], rtol=0, atol=off)


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


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["adagrad", "rprop"])
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


@pytest.mark.parametrize("offloads", [False, True])
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
        engine.backward(engine(batch(0).bfloat16()).float().pow(2).mean())
        engine.step()
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
        return held, {flat.spec.wide for flat in plan.trainable}

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


def test_the_start_summary_says_what_is_kept_in_bf16(heard_in_full):
    def train(rank, model):
        for config in (settings(2, moments=True), kahan(2)):
            start(model, KINDS["adamw"](model.parameters()), config).destroy()

    on_ranks(1, train, build=wide)
    for said in (
        "master weights and moments in bf16, rounded stochastically",
        "master weights in bf16, with Kahan sums",
    ):
        assert any(said in message for message in heard_in_full)


def test_eight_bit_moments_without_masters_take_two_bytes_each():
    """Of a parameter: two bytes of weights, of the gradient and of moments, and the scales."""
    large = {"d_model": 256, "nhead": 4, "dim_feedforward": 1024}
    plan = planned(
        nn.TransformerEncoderLayer(**large, device="meta"),
        settings(0),
        1,
        lambda model: AdamW8bit(model.parameters()),
    )
    numel = sum(p.numel() for p in plan.model.parameters())
    parts = state_bytes(plan)
    assert parts["parameters", "device"] == parts["gradients", "device"]
    assert parts["parameters", "device"] == pytest.approx(2 * numel, rel=1e-3)
    assert parts["optimizer", "device"] == pytest.approx(2 * numel * (1 + 4 / 256), rel=0.05)


def kahan(stage, moments=False, **more):
    config = settings(stage, moments, **more)
    config["bf16"]["kahan_summation"] = True
    return config


def compensated(model, steps):
    """Weights and errors after ``steps`` of SGD in fp32 on ``model``, in bf16."""
    named = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    optimizer = KINDS["sgd"](masters.values())
    errors = {name: torch.zeros_like(p) for name, p in masters.items()}
    for step in steps:
        loss_of(model, step).backward()
        for name, p in named.items():
            masters[name].grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                near = master.bfloat16().float()
                exact = near + (master - near).bfloat16().float()
                named[name].copy_(exact)
                errors[name] = exact - named[name].float()
                master.copy_(exact)
    return {name: p.detach().float() for name, p in named.items()}, errors


@pytest.mark.turns
@pytest.mark.parametrize("offloads", [None, "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_kahan_sums_keep_the_errors_of_weights(stage, offloads, tmp_path):
    """Also over a resume on other ranks; a run with fp32 master weights takes the sums."""
    model = wide().bfloat16()
    weights, errors = compensated(model, range(STEPS))

    def train(rank, model, steps, config, world=2):
        if offloads and "kahan_summation" in config["bf16"]:
            config["zero_optimization"]["offload_optimizer"] = {"device": offloads}
        engine = start(model, KINDS["sgd"](model.parameters()), config)
        if steps[0]:
            engine.load_checkpoint(tmp_path)
        run(engine, steps)
        if "kahan_summation" in config["bf16"]:
            engine.save_checkpoint(tmp_path)
        found = full_weights(engine), states(engine), held_bytes(engine)
        engine.destroy()
        plan = planned(wide(), config, world, lambda m: KINDS["sgd"](m.parameters()), rank=rank)
        foreseen = sum((plan.optimizer_bytes(flat) for flat in plan.flats), Counter())
        for tier in ("device", "ram"):
            assert found[2]["optimizer", tier] == foreseen[tier]
        return found

    on_ranks(2, train, range(2), kahan(stage), build=wide)
    for whole, found, _ in on_ranks(4, train, range(2, STEPS), kahan(stage), 4, build=wide):
        got = {name: value.float() for (name, key), value in found.items() if key == "compensation"}
        if offloads is None:
            assert_equal(whole, weights)
            assert_equal(got, errors)
        for name, value in weights.items():  # the host's kernel rounds fp32 in other places
            sums = whole[name] + got[name], value + errors[name]
            torch.testing.assert_close(*sums, rtol=2.0**-15, atol=1e-6)
        saved = {name: value + got[name] for name, value in whole.items()}
    full = config_of(2, bf16={"enabled": True})

    def take(rank, model):
        engine = start(model, KINDS["sgd"](model.parameters()), full)
        engine.load_checkpoint(tmp_path)
        found = full_weights(engine)
        engine.destroy()
        return found

    found = on_ranks(2, take, build=wide)[0]
    assert_equal(found, saved)


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


@pytest.mark.parametrize("stage", [1, 3])
def test_state_dicts_of_torch_have_kahan_sums_before_the_first_step(stage):
    """torch.distributed.checkpoint loads the entries that the state dict of a new engine has."""

    def train(rank, models):
        found = []
        for model, trains in zip(models, (True, False)):
            engine = start(model, KINDS["adamw"](model.parameters()), kahan(stage))
            run(engine, range(2 * trains))
            _, content = get_state_dict(model, engine.optimizer)
            found.append(
                {
                    (name, kind): (value.dtype, value.shape)
                    for name, state in content["state"].items()
                    for kind, value in state.items()
                }
            )
            engine.destroy()
        return found

    for stepped, new in on_ranks(2, train, build=lambda: (wide(), wide())):
        assert ("up.weight", "compensation") in new and new == stepped


@pytest.mark.parametrize("way", ["universal", "dcp", "torch"])
def test_runs_without_kahan_sums_load_conversions_with_them(way, tmp_path):
    """The fp32 master weights take the sums; those of torch's state dict, read apart from the
    optimizer's, do not.
    """

    def train(rank, model, target):
        engine = start(model, KINDS["adamw"](model.parameters()), kahan(2))
        run(engine, range(STEPS))
        want = {key: value.float() for key, value in states(engine).items()}
        want = {key: value for key, value in want.items() if key[1] != "compensation"}
        errors = {n: v.float() for (n, kind), v in states(engine).items() if kind == "compensation"}
        sums = {name: value + errors[name] for name, value in full_weights(engine).items()}
        saved = None
        if way == "torch":
            saved = copy.deepcopy(get_state_dict(model, engine.optimizer))
        else:
            engine.save_checkpoint(tmp_path / "run")
            if rank == 0:
                convert_checkpoint(tmp_path / "run", tmp_path / "out", to=way)
            torch.distributed.barrier()
        engine.destroy()
        engine = start(target, KINDS["adamw"](target.parameters()), config_of(2, bf16=FP32))
        if saved:
            model_state, state = saved
            set_state_dict(
                target, engine.optimizer, model_state_dict=model_state, optim_state_dict=state
            )
        else:
            engine.load_checkpoint(tmp_path / "out")
        assert_equal({key: value.float() for key, value in states(engine).items()}, want)
        for name, value in full_weights(engine).items():
            expected = sums[name].bfloat16().float() if way == "torch" else sums[name]
            assert torch.equal(value.view_as(expected), expected), name
        run(engine, [STEPS])
        engine.destroy()

    on_ranks(2, lambda rank, pair: train(rank, *pair), build=lambda: (wide(), wide()))


@pytest.mark.parametrize("stage", [1, 3])
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


def test_kahan_sums_are_nearer_to_fp32_than_rounded_weights():
    """Of 40 steps of which each changes less than a place of bf16."""
    ends = {}
    for name in ("fp32", "kahan", "nearest"):
        parameter = torch.full((4096,), 1.0, dtype=torch.float32 if name == "fp32" else BF16)
        errors = torch.zeros_like(parameter)
        for _ in range(40):
            exact = parameter.float() + (errors.float() if name == "kahan" else 0.0) - 1e-4
            if name == "kahan":
                bf16_state._split(exact, parameter, errors)
            else:
                parameter.copy_(exact)
        ends[name] = parameter.float() + (errors.float() if name == "kahan" else 0.0)
    assert (ends["kahan"] - ends["fp32"]).abs().max() < 3e-5
    assert (ends["nearest"] - ends["fp32"]).abs().max() > 3e-3


@pytest.mark.parametrize("stage", [1, 2])
def test_kahan_sums_beside_moments_in_8_bits_and_frozen_parameters_resume(stage, tmp_path):
    def train(rank, model, steps):
        model.head.requires_grad_(False)
        engine = start(model, AdamW8bit(model.parameters()), kahan(stage))
        if steps[0]:
            engine.load_checkpoint(tmp_path)
        run(engine, steps)
        engine.save_checkpoint(tmp_path)
        found = full_weights(engine), states(engine)
        engine.destroy()
        return found

    want = on_ranks(1, train, range(4), build=wide)[0]
    on_ranks(2, train, range(2), build=wide)
    got = on_ranks(4, train, range(2, 4), build=wide)[0]
    assert_equal(got[0], want[0])
    trained = {key: value for key, value in want[1].items() if "head" not in key[0]}
    assert_equal({key: got[1][key] for key in trained}, trained)


def test_copies_of_pipeline_stages_are_rounded_alike_whatever_their_names():
    values = torch.randn(50, 90, generator=torch.Generator().manual_seed(0))
    ends = {}
    for name, stages in (("embed", ()), ("head", ()), ("embed", (0, 1)), ("head", (0, 1))):
        (flats,) = shard([{name: values.bfloat16()}], 1, together=True)
        flats[0].master = flats[0].master.bfloat16()
        flats[0].shared_by = stages
        parameter = nn.Parameter(values)
        optimizer = torch.optim.SGD([parameter], lr=1e-3)
        state = Bf16State(masters=True, moments=False)
        bound = BoundOptimizer(optimizer, flats, {name: 0}, {name: parameter}, bf16=state)
        flats[0].grad.fill_(1.0)
        bound.step(number=3)
        ends[name, stages] = flats[0].master
    assert torch.equal(ends["embed", (0, 1)], ends["head", (0, 1)])
    assert not torch.equal(ends["embed", ()], ends["head", ()])
