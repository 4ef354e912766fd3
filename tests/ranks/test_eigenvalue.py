"""The eigenvalues that set the pace of MoQ: against power iteration over the dense Hessian of each
layer in plain torch, at every stage, and the bits that follow from them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from hf_zero.errors import ConfigError, RankMismatchError
from hf_zero.techniques.eigenvalue import direction_of
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES, Stack, features, seeded
from tests.helpers.sequences import llama
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps
from tests.helpers.training import plain_sgd

WIDTH = 4
SECTION: dict[str, Any] = {
    "enabled": True,
    "quantize_bits": {"start_bits": 8, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0},
}
EIGENVALUE = {
    "enabled": True, "layer_name": "blocks", "layer_num": 3, "tol": 1e-2, "max_iter": 100,
}  # fmt: skip


class Losing(Stack):
    """Returns its loss; layers further back are wider in scale, so that their curvatures differ."""

    def __init__(self, dropout=0.5, width=WIDTH):
        super().__init__(3, width)
        self.dropout = nn.Dropout(dropout)
        for scale, block in zip((0.5, 1.0, 2.0), self.blocks):
            for parameter in block.parameters():
                parameter.data.mul_(scale)

    def forward(self, x):
        return {"loss": self.dropout(super().forward(x)).pow(2).mean()}


def losing():
    return seeded(Losing)


def dense(weights, ranks, step, micro):
    """Return the eigenvalue of each block's Hessian by the iteration, over the largest of all."""
    model = losing().eval()
    found = []
    for number in range(3):
        own = {n: w for n, w in weights.items() if n.startswith(f"blocks.{number}.")}

        def loss_of(flat, own=own):
            parts = flat.split([w.numel() for w in own.values()])
            values = {n: p.view(w.shape) for (n, w), p in zip(own.items(), parts)}
            losses = [
                functional_call(model, {**weights, **values}, (features(step, micro, rank),))
                for rank in range(ranks)
            ]
            return sum(each["loss"] for each in losses) / ranks

        flat = torch.cat([w.flatten() for w in own.values()])
        hessian = torch.autograd.functional.hessian(loss_of, flat)
        vector = torch.cat([direction_of(name, each.numel()) for name, each in own.items()])
        value, before = 1.0, 0.0
        while abs(value - before) >= EIGENVALUE["tol"] * abs(value):
            vector, before = vector / vector.norm(), value
            product = hessian @ vector
            value, vector = float(product @ vector), product
        assert abs(value) <= torch.linalg.eigvalsh(hessian).abs().max() * 1.001
        found.append(abs(value))
    return [value / max(found) for value in found]


def engine_of(model, stage, more, **section):
    eigenvalue = {**EIGENVALUE, **section}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    section = {**SECTION, "eigenvalue": eigenvalue}
    config = config_of(stage, **{"zero_optimization": zero, "quantize_training": section, **more})
    return start(model, plain_sgd(model), config)


def train(engine, rank, steps, accumulation=1):
    technique, bits = engine.feature_set.by_name["quantize_training"], []
    for step in steps:
        for micro in range(accumulation):
            engine.backward(engine(features(step, micro, rank))["loss"])
            engine.step()
        now = technique.bits()
        bits.append([now[f"blocks.{number}.up.weight"] for number in range(3)])
    return bits


def test_eigenvalues_are_those_of_the_dense_hessian_and_set_the_bits():
    """The next fall of a layer is at 2 (1 + floor(4 λ)) times the step of this one."""
    ranks, accumulation = 2, 2
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    more = {"gradient_accumulation_steps": accumulation, "zero_optimization": zero}

    def run(rank, model):
        engine = engine_of(model, 3, more)
        bits = train(engine, rank, range(1), accumulation)
        before = full_weights(engine)
        bits += train(engine, rank, range(1, 2), accumulation)
        found = engine.feature_set.state_dict()["quantize_training"]
        return found, bits, before, full_weights(engine), engine.micro_steps

    answers = on_ranks(ranks, run, build=losing)
    state, bits, before, weights, micro_steps = answers[0]
    assert all(answer[0] == state for answer in answers)
    assert micro_steps == 2 * accumulation
    wanted = dense(weights, ranks, 1, accumulation - 1)
    assert min(wanted) < 0.9
    for got, value in zip(state["eigenvalues"], wanted, strict=True):
        assert math.isclose(got, value, rel_tol=2e-2), (state["eigenvalues"], wanted)
    assert any(not torch.equal(before[name], weights[name]) for name in before)
    assert bits == [[8, 8, 8], [7, 7, 7]]
    for (_, until, since), value in zip(state["layers"], state["eigenvalues"], strict=True):
        assert (since, until) == (2, 4 * (1 + math.floor(4 * value)))
    assert len({until for _, until, _ in state["layers"]}) > 1


@on_each_rank(2, build=lambda: seeded(lambda: Losing(0.0, 64)))
def test_refuses(rank, model):
    for section, more, said in (
        ({"layer_name": "encoder.layer"}, {}, r"no list of them at 'encoder\.layer'"),
        ({"layer_num": 4}, {}, "layer_num = 4"),
        ({}, {"compressed_communication": {"bits": 4}}, "gradients in few bits"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine_of(model, 1, more, **section)
    engine = engine_of(seeded(Stack), 1, {})
    with pytest.raises(ConfigError, match="returns its loss"):
        run_steps(engine, rank, range(2))
    engine = engine_of(seeded(lambda: Losing(0.0)), 1, {})
    engine.train(rank == 0)
    with pytest.raises(RankMismatchError if rank == 0 else ConfigError, match="in training mode"):
        train(engine, rank, range(2))


def test_batches_that_phases_have_cut(tmp_path):
    """Measured on what was trained on; a checkpoint of a run without bits has none of them."""
    model = ARCHITECTURES["gpt2"].build()
    config = config_of(0, training_phases={"phases": [{"sequence_length": 4}]})
    start(model, plain_sgd(model), config).save_checkpoint(str(tmp_path))
    section = {
        **SECTION,
        "eigenvalue": {**EIGENVALUE, "layer_name": "transformer.h", "layer_num": 2, "max_iter": 2},
    }
    model = ARCHITECTURES["gpt2"].build()
    engine = start(model, plain_sgd(model), {**config, "quantize_training": section})
    technique = engine.feature_set.by_name["quantize_training"]
    begin = technique.state_dict()
    for step in range(3):
        engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, 0, 0)).loss)
        engine.step()
    assert technique._stretched._eigenvalues._call[1]["input_ids"].shape[1] == 4
    assert technique.state_dict() != begin
    engine.load_checkpoint(str(tmp_path))
    assert technique.state_dict() == begin
    engine.destroy()


@on_each_rank(2, build=lambda: seeded(llama))
def test_refuses_parts_of_sequences(rank, model):
    with pytest.raises(ConfigError, match="only a part of each sequence"):
        engine_of(model, 1, {"sequence_parallel_size": 2}, layer_name="model.layers", layer_num=2)
