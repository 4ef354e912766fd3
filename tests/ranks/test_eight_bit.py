"""Moments in bitsandbytes' 8 bits: conversions, reads and writes of state. Bits at every stage,
offloaded, and after a resume elsewhere are rows of ``test_capabilities.py``.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.deepspeed.engine import _state_of
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.host import Blocks
from hf_zero.optim import AdamW8bit, SGD8bit
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.stacks import on_ranks

KINDS = {
    "adamw": lambda params: AdamW8bit(params, lr=1e-3, weight_decay=0.1),
    "sgd": lambda params: SGD8bit(params, lr=1e-2, momentum=0.9, nesterov=True),
}
WIDTH, HIDDEN, ROWS = 50, 90, 4
STEPS = 4


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
    return net(batch(step)).pow(2).mean()


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
    names = {name for flat in engine.bound._flats for name in engine.bound.tensors(flat)}
    return {
        (name, key): hf_zero.safe_get_full_optimizer_state(p, key)
        for name, p in engine.module.named_parameters()
        for key in sorted(names - {"master"})
    }


def plainly(kind, steps=range(STEPS)):
    """Weights, states and losses of one process without an engine."""
    model = wide()
    optimizer = KINDS[kind](model.parameters())
    losses = []
    for step in steps:
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
    in_8_bits = {
        name
        for name, p in model.named_parameters()
        if any(isinstance(value, Blocks) for value in optimizer.state[p].values())
    }
    assert in_8_bits == {"up.weight", "down.weight"}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return weights, found, losses


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name].view_as(value), value), name


class Deep(nn.Module):
    """On some ranks only padding of one flat buffer is in front of moments of the next."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, 82, 82, 64, 90)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def deep() -> nn.Module:
    return seeded(Deep)


def sharded(stage):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return config_of(stage, zero_optimization=zero)


def test_blocks_begin_with_each_flat_buffer(tmp_path):
    def save(rank, model):
        engine = start(model, KINDS["adamw"](model.parameters()), sharded(3))
        run(engine, range(2))
        engine.save_checkpoint(tmp_path)
        moments.append(states(engine))
        engine.destroy()

    def load(rank, model):
        engine = start(model, KINDS["adamw"](model.parameters()), sharded(2))
        engine.load_checkpoint(tmp_path)
        assert_equal(states(engine), moments[0])
        engine.destroy()

    moments: list[dict[tuple[str, str], torch.Tensor]] = []
    on_ranks(4, save, build=deep)
    on_ranks(2, load, build=deep)


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
        assert engine.bound.names_in_8_bits == {"up.weight", "down.weight"}
        engine.destroy()

    on_ranks(2, save, build=wide)
    on_ranks(2, load, build=wide)


IN_FP32 = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
}


@in_turn("kind", IN_FP32)
def test_runs_change_between_moments_in_8_bits_and_in_fp32(kind, tmp_path):
    _, _, losses = plainly(kind, range(6))

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

    _, saved = on_ranks(2, resume, KINDS[kind], range(2), build=wide)[0]
    loaded, saved_in_fp32 = on_ranks(2, resume, IN_FP32[kind], range(2, 4), build=wide)[0]
    assert_equal(loaded, saved)
    loaded, _ = on_ranks(4, resume, KINDS[kind], range(4, 6), build=wide)[0]
    for (name, key), value in saved_in_fp32.items():
        coarse = value.abs().max() / 25 if name in ("up.weight", "down.weight") else 0.0
        assert (loaded[name, key] - value).abs().max() <= coarse, (name, key)


def test_a_state_dict_and_state_from_before_the_engine_go_on():
    weights, want, _ = plainly("adamw")

    def train(rank, model):
        optimizer = KINDS["adamw"](model.parameters())
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
        run(engine, range(3, STEPS))
        assert_equal(states(engine), want)
        assert_equal(full_weights(engine), weights)
        engine.destroy()

    on_ranks(2, train, build=wide)


@in_turn("stage", [1, 3])
def test_parameters_that_begin_to_train_keep_the_state_of_the_others(stage):
    """The engine is built again; the bits are those of the same lines in one process."""
    plain = wide()
    plain.up.requires_grad_(False)
    optimizer = KINDS["adamw"](plain.parameters())
    for step in range(STEPS):
        plain.up.requires_grad_(step > 1)
        loss_of(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(rank, model):
        model.up.requires_grad_(False)
        engine = start(model, KINDS["adamw"](model.parameters()), config_of(stage))
        run(engine, range(2))
        engine.module.up.requires_grad_(True)
        run(engine, range(2, STEPS))
        assert engine.bound.names_in_8_bits == {"up.weight", "down.weight"}
        assert_equal(full_weights(engine), {n: p.detach() for n, p in plain.named_parameters()})
        found = states(engine)
        for name in ("up", "down"):
            kept = optimizer.state[plain.get_submodule(name).weight]["exp_avg_sq"].decode()
            assert torch.equal(found[f"{name}.weight", "exp_avg_sq"].view(-1), kept)
        engine.destroy()

    on_ranks(2, train, build=wide)


def test_states_are_read_written_and_found_in_memory():
    def train(rank, model):
        engine = start(model, KINDS["adamw"](model.parameters()), config_of(3))
        run(engine, range(2))
        before = states(engine)
        for (name, key), value in before.items():
            p = engine.module.get_parameter(name)
            hf_zero.safe_set_full_optimizer_state(p, value, key)
        assert_equal(states(engine), before)
        weight = engine.module.down.weight
        hf_zero.safe_set_full_optimizer_state(weight, torch.ones(WIDTH, HIDDEN), "exp_avg_sq")
        assert states(engine)["down.weight", "exp_avg_sq"].eq(1).all()
        moved = [tensor for kind, tensor in _state_of(engine) if kind == "optim_states"]
        masters = sum(flat.optimizer_shard.master.nbytes for flat in engine.sharded_model.trainable)
        assert {tensor.dtype for tensor in moved} == {torch.uint8, torch.float32}
        engine.destroy()
        return sum(tensor.nbytes for tensor in moved), masters

    for moments, masters in on_ranks(1, train, build=wide):
        assert moments < 0.8 * masters  # a quarter each, and fp32 of the small ones


def test_other_offloaded_moments_are_refused():
    def train(rank, model):
        config = config_of(2)
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "moments": "int8"}
        with pytest.raises(UnsupportedOptimizerError, match=r"AdamW8bit.*moments is 'int8'"):
            start(model, KINDS["adamw"](model.parameters()), config)
        assert isinstance(model.up.weight, nn.Parameter)

    on_ranks(1, train, build=wide)
