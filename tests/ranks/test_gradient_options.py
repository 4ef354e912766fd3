"""Options that change how gradients travel and add up, none of which may change what they are; the
passes over memory that they cost; sparse gradients, torch.autocast, the dtype of buffers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.errors import NotBuiltError
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, engine_opener, full_grads, start, train_on_threads
from tests.helpers.models import features, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan, StackJob, plain_sgd
from tests.ranks.cases import expect, trains_alike

RANKS = 2


class PlainStack(StackJob):
    name = "plain stack with sgd"

    def optimizer(self, model):
        return plain_sgd(model)


@in_turn("stage, key, dtype", [(0, "bf16", torch.bfloat16), (3, "fp16", torch.float16)])
def test_communication_in_16_bits_rounds_and_no_more(stage, key, dtype):
    """Gradients of fp32 training are off by that rounding: not exact, not worse."""
    plan, eps = Plan(ranks=RANKS, steps=1), torch.finfo(dtype).eps
    got = train_on_threads(PlainStack(), plan, engine_opener(stage, communication_data_type=key))
    want = oracle.kept(PlainStack(), plan)
    error = oracle.errors(got, want)["gradients"] / want.norms[0]
    assert 0.02 * eps < error < eps, f"relative error {error:.3g}, rounding of {dtype} is {eps:.3g}"


class Adds(nn.Module):
    """The gradient of a weight is x."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 16, bias=False) for _ in range(2))

    def forward(self, x):
        return sum(block(x).sum() for block in self.blocks)


@in_turn("stage, kept_in", [(0, "bf16"), (3, None)])
def test_small_addends_survive_in_fp32(stage, kept_in):
    """1 + 32 × 2^-9 is 1.0625 in fp32, the default, and stays 1 in bf16."""
    more = {"data_types": {"grad_accum_dtype": kept_in}} if kept_in else {}
    want = 1.0 if kept_in == "bf16" else 1 + 32 * 2.0**-9

    def run(rank, model):
        plan = Plan(accumulation=33, precision="bf16")
        engine = start(model, plain_sgd(model), config_of(stage, plan, **more))
        for micro in range(33):
            x = torch.full((1, 1), 1.0 if micro == 0 else 2.0**-9, dtype=torch.bfloat16)
            engine.backward(engine(x), scale_wrt_gas=False)
            if micro < 32:
                engine.step()
        return full_grads(engine)

    exact = {f"blocks.{i}.weight": torch.full((16, 1), want) for i in range(2)}
    expect(exact, run, build=lambda: seeded(Adds), tolerance=1e-3)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, step, rank):
        return self.head(self.words(torch.tensor([step, rank, 5]))).square().mean()


def test_a_sparse_gradient_counts_as_a_dense_one_and_is_named_once(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        "hf_zero.zero.reduce.reductions.log_rank0", lambda message, level: said.append(message)
    )

    def micro(net, at):
        loss = net(at.step, at.rank)
        net.backward(loss)
        return loss

    trains_alike(micro, 3, make=Words)
    assert len(said) == RANKS, "one of each rank's engine, of which rank 0's is logged"
    assert all("words.weight" in text for text in said)


def test_the_forward_computes_in_fewer_bits_and_parameters_keep_theirs():
    def micro(net, at):
        plain = not hasattr(net, "engine")
        with torch.autocast("cpu", torch.bfloat16) if plain else nullcontext():
            out = net(features(at.step, at.micro, at.rank))
        assert out.dtype == torch.bfloat16
        loss = out.float().square().mean()
        net.backward(loss)
        return loss

    trains_alike(micro, 3, torch_autocast={"enabled": True, "dtype": "torch.bfloat16"})
    section = {"enabled": True, "dtype": "torch.float16"}
    with pytest.raises(NotBuiltError, match=r"torch_autocast\.dtype"):
        ZeroConfig.coerce(config_of(1, torch_autocast=section))


FREQUENCIES = torch.linspace(0, 1, 4)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("frequencies", FREQUENCIES.clone())
        self.up.register_buffer("same", self._buffers["frequencies"])
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.down(self.up(x) * self.frequencies.to(x.dtype))


@in_turn("stage, written", [(1, None), (3, "fp16")])
def test_buffers_are_cast_where_it_is_asked_for(stage, written, tmp_path):
    models = [WithBuffers() for _ in range(2)]
    for p in models[1].buffers():
        p.zero_()  # rank 0's values count
    dtype = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[written]

    def run(rank):
        model: Any = models[rank]
        types = {"buffer_dtype": written} if written else {}
        config = config_of(stage, Plan(precision="bf16"), data_types=types)
        engine = start(model, plain_sgd(model), config)
        assert torch.equal(model.frequencies, FREQUENCIES.to(dtype))
        assert model.frequencies.dtype == dtype and model.up.same is model.frequencies
        assert model.count.dtype == torch.long and model.count == 3
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(tmp_path / str(written))
        model.frequencies.zero_()
        engine.load_checkpoint(tmp_path / str(written))
        assert torch.equal(model.frequencies, FREQUENCIES.to(dtype))
        engine.destroy()

    run_ranks(2, run)
