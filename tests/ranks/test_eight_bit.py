"""Moments in bitsandbytes' 8 bits: conversions, reads and writes of state. Bits at every stage,
offloaded, and after a resume elsewhere are rows of ``test_capabilities.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops.host import Blocks
from hf_zero.optim import AdamW8bit
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.stacks import on_ranks


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
        assert engine.bound.names_in_8_bits == {"up.weight", "down.weight"}
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
