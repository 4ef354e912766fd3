"""Writes of a script to weights past the engine count as in a plain loop: in place, through
``.data``, into ``.data``.

The plain loop keeps master weights by hand, whose changed elements are taken from the working
weights after each write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hf_zero
from hf_zero.distributed import process_group
from hf_zero.errors import PartitionError
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, plain_sgd

STEPS, RANKS = 3, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
Write = Callable[[nn.Module, dict[str, Any]], None]


def _zero(model, memory):
    with torch.no_grad():
        model.head.weight.zero_()
        model.blocks[1].up.weight[3:5] = 0.5


def _clip(model, memory):
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def _initialise(model, memory):
    nn.init.constant_(model.blocks[0].norm.weight, 0.5)
    nn.init.eye_(model.head.weight)


def _assign(model, memory):
    for p in model.parameters():
        p.data = p.data * 0.7


def _transpose(model, memory):
    weight = model.square.weight
    weight.data = weight.data.t()


def _vector(model, memory):
    vector_to_parameters(
        parameters_to_vector(model.parameters()).detach() * 0.7, model.parameters()
    )


def _add(model, memory):
    model.head.bias.data += 0.25
    model.blocks[2].down.weight.data -= 0.01


def _average(model, memory):
    """An average of the weights, copied back."""
    kept = memory.setdefault("average", [p.detach().clone() for p in model.parameters()])
    with torch.no_grad():
        for average, p in zip(kept, model.parameters()):
            average.lerp_(p, 0.25)
            p.copy_(average)


def _kept_alias(model, memory):
    for values in memory.setdefault("aliases", [p.data for p in model.blocks[1].parameters()]):
        values.view(-1)[::2] = 0.125


def _set(model, memory):
    with torch.no_grad():
        model.head.weight.set_(model.head.weight * 0.7)


WRITES: dict[str, Write] = {
    each.__name__.strip("_"): each
    for each in (
        _zero,
        _clip,
        _initialise,
        _assign,
        _transpose,
        _vector,
        _add,
        _average,
        _kept_alias,
        _set,
    )
}
CPU = {"device": "cpu"}
WHOLE = {"stage3_param_persistence_threshold": 1_000_000}
SETTINGS = [
    (0, "fp32", {}),
    (1, "fp32", {}),
    (2, "fp32", {"offload_optimizer": CPU}),
    (0, "bf16", {}),
    (1, "bf16", {"offload_optimizer": CPU}),
    (2, "bf16", {}),
    (1, "fp16", {}),
    (3, "fp32", WHOLE),
    (3, "bf16", WHOLE | {"offload_optimizer": CPU, "offload_param": CPU}),
]


class Squared(Stack):
    def __init__(self):
        super().__init__()
        self.square = nn.Linear(5, 5)

    def forward(self, x):
        return self.square(super().forward(x))


def build():
    return seeded(Squared)


def by_hand(write, precision):
    """Master weights after a plain loop in one process."""
    masters, dtype = build(), DTYPES[precision]
    model = copy.deepcopy(masters).to(dtype)
    optimizer, memory = plain_sgd(masters), {}
    for step in range(STEPS):
        for rank in range(RANKS):
            (squared(model, At(step, 0, rank), dtype) / RANKS).backward()
        for p, master in zip(model.parameters(), masters.parameters()):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.parameters()):
                p.copy_(master)
        write(model, memory)
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.parameters()):
                master.copy_(torch.where(p == master.to(dtype), master, p.to(master.dtype)))
    return {name: p.detach() for name, p in masters.named_parameters()}


CELLS = fast(
    [(write, *setting) for write in WRITES for setting in SETTINGS],
    lambda write, *setting: (list(WRITES).index(write) + SETTINGS.index(setting)) % 3 == 0,
)


@pytest.mark.parametrize(("write", "stage", "precision", "more"), CELLS)
def test_what_is_written_after_a_step_is_what_the_next_one_updates(write, stage, precision, more):
    plan = Plan(ranks=RANKS, precision=precision)

    def run(rank, model):
        config = config_of(stage, plan)
        config["zero_optimization"] |= more
        engine, memory = start(model, plain_sgd(model), config), {}
        for step in range(STEPS):
            run_steps(engine, rank, [step])
            WRITES[write](model, memory)
        weights = full_weights(engine)
        for name, p in model.named_parameters():
            assert torch.equal(p.float(), weights[name].to(p.dtype).float()), (
                f"{name} is not its master weights"
            )
            assert p.data_ptr() == p.__dict__["_hf_zero_flat"].views[name].data_ptr()
        engine.destroy()
        return weights

    want = by_hand(WRITES[write], precision)
    for got in on_ranks(RANKS, run, build=build):
        compare_tensors(f"weights after {write}", got, want, TOLERANCE[precision], 1e-6)


class Normalised(nn.Module):
    """A layer whose forward puts its weight on the unit sphere by assignment, or in place."""

    def __init__(self, assigns):
        super().__init__()
        self.weight, self.assigns = nn.Parameter(torch.randn(8, 8)), assigns

    def forward(self, x):
        unit = nn.functional.normalize(self.weight.data, dim=1)
        if self.assigns:
            self.weight.data = unit
        else:
            with torch.no_grad():
                self.weight.copy_(unit)
        return nn.functional.linear(x, self.weight)


class Codebook(nn.Module):
    """A frozen table that moves towards what it is given, as vector quantisers do."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x):
        if self.training:
            self.table.data.lerp_(torch.full_like(self.table, 0.5), 0.1)
        return x + x.detach() @ self.table


class ForwardWrites(nn.Module):
    """Layers that change their own weights in the forward."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 8, max_norm=0.5)
        self.blocks = nn.ModuleList(
            [Normalised(True), Codebook(), Normalised(False), nn.Linear(8, 8)]
        )

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _ids(step):
    return torch.tensor([[0, 1, 2 + step, 8], [3, 4, 5, 7]])


def _forward_loss(net, step):
    return net(_ids(step)).float().pow(2).sum()


@pytest.mark.parametrize(("stage", "more"), [*((s, {}) for s in STAGES), (2,
{"offload_optimizer": CPU}), (3, {"offload_optimizer": CPU, "offload_param": CPU})])  # fmt: skip
def test_weights_that_a_forward_changes_stay_changed(stage, more):
    """``nn.Embedding(max_norm=)``, a forced weight norm, a codebook: also after an evaluation
    without a step.
    """
    want = seeded(ForwardWrites)
    optimizer = plain_sgd(want)
    for step in range(STEPS):
        _forward_loss(want, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    _forward_loss(want, 4)

    def run(rank, model):
        config = config_of(stage)
        config["zero_optimization"] |= more
        engine = start(model, plain_sgd(model), config)
        for step in range(STEPS):
            engine.backward(_forward_loss(engine, step))
            engine.step()
        _forward_loss(engine, 4)
        return full_weights(engine)

    for got in on_ranks(RANKS, run, build=lambda: seeded(ForwardWrites)):
        compare_tensors("weights", got, {name: p.detach() for name, p in want.named_parameters()})


@on_each_rank(RANKS, build=lambda: seeded(ForwardWrites))
def test_a_forward_that_writes_at_stage_3_in_bf16_reaches_the_master_weights(rank, model):
    engine = start(model, plain_sgd(model), config_of(3, Plan(precision="bf16")))
    engine.backward(_forward_loss(engine, 0))
    engine.step()
    _forward_loss(engine, 1)
    for index in (0, 2):
        norms = hf_zero.safe_get_full_fp32_param(model.blocks[index].weight).norm(dim=1)
        assert (norms - 1).abs().max() < 1e-2, f"block {index} is not normalised: {norms}"


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_what_is_written_is_saved_and_read_before_the_next_step(rank, model, stage, tmp_path):
    engine = start(model, plain_sgd(model), config_of(stage, Plan(precision="bf16")))
    run_steps(engine, rank, [0])
    with hf_zero.GatheredParameters([model.head.weight], modifier_rank=0):
        model.head.weight.data.fill_(2.0)
    if stage < 3:
        model.head.bias.data = torch.full_like(model.head.bias, 3.0)
        assert hf_zero.safe_get_full_fp32_param(model.head.bias).eq(3).all()
        model.head.bias.data.fill_(4.0)
        # of the same buffer
        hf_zero.safe_set_full_fp32_param(model.head.weight, torch.full((5, 32), 2.0))
    saved = engine.save_checkpoint(str(tmp_path), "now")
    with (
        torch.no_grad(),
        hf_zero.GatheredParameters([model.head.bias, model.head.weight], modifier_rank=0),
    ):
        model.head.weight.zero_(), model.head.bias.zero_()
    engine.load_checkpoint(str(tmp_path), "now")
    assert saved and hf_zero.safe_get_full_fp32_param(model.head.weight).eq(2).all()
    assert stage == 3 or model.head.bias.eq(4).all()
    assert stage == 3 or hf_zero.safe_get_full_fp32_param(model.head.bias).eq(4).all()


@on_each_rank(RANKS)
def test_what_is_written_inside_gathered_parameters_without_a_modifier_is_dropped_at_stage_3(
    rank, model
):
    engine = start(model, plain_sgd(model), config_of(3))
    before = hf_zero.safe_get_full_fp32_param(model.head.weight).clone()
    with torch.no_grad(), hf_zero.GatheredParameters(model.head):
        model.head.weight.zero_()
        model.head.bias.data.zero_()
    engine.backward(squared(engine, At(0, 0, rank)))
    assert torch.equal(before, hf_zero.safe_get_full_fp32_param(model.head.weight))


@pytest.mark.parametrize("stage", STAGES[:3])
def test_data_of_another_kind_is_refused(stage):
    model = stack()
    engine = start(model, plain_sgd(model), config_of(stage))
    bias = model.head.bias
    engine.backward(squared(engine, At(0, 0, 0)))
    for wrong in (
        torch.zeros(6),
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(5, device="meta"),
    ):
        with pytest.raises(
            PartitionError,
            match=r"head\.bias\.data of shape \(5,\).* was given a tensor of shape .*; assign "
            r"values of the same kind",
        ):
            bias.data = wrong
    engine.step()
    process_group.destroy_process_group()


def test_a_frozen_parameter_may_still_be_cast():
    """Libraries cast biases of quantised layers in their forward."""
    model = stack()
    model.head.requires_grad_(False)
    engine = start(model, plain_sgd(model), config_of(1))
    model.head.bias.data = model.head.bias.data.double()
    assert model.head.bias.dtype == torch.float64
    engine.destroy()
    process_group.destroy_process_group()


def test_a_step_looks_closer_only_where_something_was_written(monkeypatch):
    from hf_zero.zero.layout.flat_buffer import FlatBuffer

    looked: list[str] = []
    take = FlatBuffer._take_written
    monkeypatch.setattr(
        FlatBuffer, "_take_written", lambda self, name: (looked.append(name), take(self, name))
    )
    model = stack()
    engine = start(model, plain_sgd(model), config_of(2, Plan(precision="bf16")))
    for step in range(2):
        run_steps(engine, 0, [step])
        engine.state_dict()
    assert looked == []
    model.head.bias.data.mul_(2.0)
    _ = model.head.weight.data.sum()
    run_steps(engine, 0, [2])
    assert looked == ["head.bias"]
    process_group.destroy_process_group()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_from_before_a_step_does_not_go_backward_after_it(stage, offload):
    """Plain PyTorch raises as well: weights that the backward reads have changed in place."""
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=zero))
        for step in range(2):
            early = squared(engine, At(step, 1, rank))
            run_steps(engine, rank, [step])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                engine.backward(early)
            engine.zero_grad()
        return full_weights(engine)

    plain, optimizer = (model := stack()), plain_sgd(model)
    early = squared(plain, At(0, 1, 0))
    squared(plain, At(0, 0, 0)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()
    one, other = on_ranks(RANKS, run)
    compare_tensors("weights", one, other)
