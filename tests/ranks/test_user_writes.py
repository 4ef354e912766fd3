"""Writes of a script to weights past the engine count as in a plain loop: in place, through
``.data``, into ``.data``.

The plain loop keeps master weights by hand, whose changed elements are taken from the working
weights after each write.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, plain_sgd
from tests.ranks.cases import expect, values_of

STEPS, RANKS = 3, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}


def initialize(model, memory):
    nn.init.constant_(model.blocks[0].norm.weight, 0.5)
    nn.init.eye_(model.head.weight)


def assign(model, memory):
    for p in model.parameters():
        p.data = p.data * 0.7


def transpose(model, memory):
    model.square.weight.data = model.square.weight.data.t()


def vector(model, memory):
    joined = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(joined * 0.7, model.parameters())


def add(model, memory):
    model.head.bias.data += 0.25
    model.blocks[2].down.weight.data -= 0.01


def average(model, memory):
    """An average of the weights, copied back."""
    kept = memory.setdefault("average", [p.detach().clone() for p in model.parameters()])
    with torch.no_grad():
        for mean, p in zip(kept, model.parameters()):
            mean.lerp_(p, 0.25)
            p.copy_(mean)


def kept_alias(model, memory):
    for values in memory.setdefault("aliases", [p.data for p in model.blocks[1].parameters()]):
        values.view(-1)[::2] = 0.125


def set_in_place(model, memory):
    with torch.no_grad():
        model.head.weight.set_(model.head.weight * 0.7)


def swap(model, memory):
    """Other weights take the place of these, and these return in the next step."""
    others = memory.setdefault("others", [p.detach() * 0.5 for p in model.parameters()])
    for other, p in zip(others, model.parameters()):
        weights = p.data
        p.data = other.data
        other.data = weights


def exchange(model, memory):
    """Two weights of one shape, and what a script has of one in a forward's graph."""
    one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    scale = torch.ones(32, dtype=one.dtype, requires_grad=True)
    early = (one.data * scale).sum()
    one.data, other.data = other.data, one.data
    early.backward()
    model.head.bias.data = scale.grad[:5] * 0.01


WRITES = [
    initialize,
    assign,
    transpose,
    vector,
    average,
    kept_alias,
    set_in_place,
    add,
    swap,
    exchange,
]
CPU = {"device": "cpu"}
WHOLE = {"stage3_param_persistence_threshold": 1_000_000}
SETTINGS = [
    (0, "fp32", {}),
    (1, "fp32", {}),
    (2, "fp32", {"offload_optimizer": CPU}),
    (1, "bf16", {"offload_optimizer": CPU}),
    (2, "bf16", {}),
    (1, "fp16", {}),
    (3, "fp32", WHOLE),
    (3, "bf16", WHOLE | {"offload_optimizer": CPU, "offload_param": CPU}),
    (2, "bf16", {}),
    (1, "fp32", {}),
]
CELLS = [(write, *setting) for write, setting in zip(WRITES, SETTINGS, strict=True)]


class Squared(Stack):
    def __init__(self):
        super().__init__()
        self.square = nn.Linear(5, 5)

    def forward(self, x):
        return self.square(super().forward(x))


def by_hand(write, precision):
    """Master weights after a plain loop in one process."""
    masters, dtype = seeded(Squared), DTYPES[precision]
    model = copy.deepcopy(masters).to(dtype)
    optimizer, memory = plain_sgd(masters), {}
    pairs = list(zip(model.parameters(), masters.parameters()))
    for step in range(STEPS):
        for rank in range(RANKS):
            (squared(model, At(step, 0, rank), dtype) / RANKS).backward()
        for p, master in pairs:
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, master in pairs:
                p.copy_(master)
        write(model, memory)
        with torch.no_grad():
            for p, master in pairs:
                master.copy_(torch.where(p == master.to(dtype), master, p.to(master.dtype)))
    return values_of(masters)


@in_turn("write, stage, precision, more", CELLS)
def test_what_is_written_after_a_step_is_what_the_next_one_updates(write, stage, precision, more):
    def run(rank, model):
        config = config_of(stage, Plan(ranks=RANKS, precision=precision))
        config["zero_optimization"] |= more
        engine, memory = start(model, plain_sgd(model), config), {}
        run_steps(engine, rank, range(STEPS), after=lambda step: write(model, memory))
        weights = full_weights(engine)
        for name, p in model.named_parameters():
            assert torch.equal(p.float(), weights[name].to(p.dtype).float()), f"master of {name}"
            assert p.data_ptr() == p.__dict__["_hf_zero_flat"].views[name].data_ptr()
        return weights

    limits = {"tolerance": TOLERANCE[precision], "floor": 1e-6}
    expect(by_hand(write, precision), run, build=lambda: seeded(Squared), **limits)


class Normalized(nn.Module):
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
    """A frozen table that moves towards what it is given, as vector quantizers do."""

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
        layers = [Normalized(True), Codebook(), Normalized(False), nn.Linear(8, 8)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, step):
        x = self.words(torch.tensor([[0, 1, 2 + step, 8], [3, 4, 5, 7]]))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().pow(2).sum()


@in_turn(
    "stage, more",
    [
        (1, {}),
        (2, {"offload_optimizer": CPU}),
        (3, {"offload_optimizer": CPU, "offload_param": CPU}),
    ],
)
def test_weights_that_a_forward_changes_stay_changed(stage, more):
    """Also after an evaluation without a step."""

    def train(net, optimizer, backward=torch.Tensor.backward):
        for step in range(STEPS):
            backward(net(step))
            optimizer.step()
            optimizer.zero_grad()
        net(4)

    def run(rank, model):
        zero = {"stage": stage, **more}
        engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=zero))
        train(engine, engine, engine.backward)
        return full_weights(engine)

    want = seeded(ForwardWrites)
    train(want, plain_sgd(want))
    expect(values_of(want), run, build=lambda: seeded(ForwardWrites))


@on_each_rank(RANKS, build=lambda: seeded(ForwardWrites))
def test_a_forward_that_writes_at_stage_3_in_bf16_reaches_the_master_weights(rank, model):
    engine = start(model, plain_sgd(model), config_of(3, Plan(precision="bf16")))
    engine.backward(engine(0))
    engine.step()
    engine(1)
    for index in (0, 2):
        norms = hf_zero.safe_get_full_fp32_param(model.blocks[index].weight).norm(dim=1)
        assert (norms - 1).abs().max() < 1e-2, f"block {index} is not normalized: {norms}"


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_what_is_written_is_saved_and_read_before_the_next_step(rank, model, stage, tmp_path):
    engine = start(model, plain_sgd(model), config_of(stage, Plan(precision="bf16")))
    run_steps(engine, rank, [0])
    weight, bias, read = model.head.weight, model.head.bias, hf_zero.safe_get_full_fp32_param
    with hf_zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.fill_(2.0)
    if stage < 3:
        bias.data = torch.full_like(bias, 3.0)
        assert read(bias).eq(3).all()
        bias.data.fill_(4.0)
        # of the same buffer
        hf_zero.safe_set_full_fp32_param(weight, torch.full((5, 32), 2.0))
    engine.save_checkpoint(str(tmp_path), "now")
    with torch.no_grad(), hf_zero.GatheredParameters([bias, weight], modifier_rank=0):
        weight.zero_()
        bias.zero_()
    engine.load_checkpoint(str(tmp_path), "now")
    assert read(weight).eq(2).all()
    if stage < 3:
        assert bias.eq(4).all() and read(bias).eq(4).all()
    else:  # without a modifier equal writes are kept
        with torch.no_grad(), hf_zero.GatheredParameters(model.head):
            weight.zero_()
            bias.data.zero_()
        engine.backward(squared(engine, At(1, 0, rank), torch.bfloat16))
        assert read(weight).eq(0).all()


@on_each_rank(1)
def test_data_of_another_kind_is_refused_but_of_a_frozen_parameter(rank, model):
    """Libraries cast biases of quantized layers in their forward."""
    frozen, bias = model.blocks[0].up.bias.requires_grad_(False), model.head.bias
    engine = start(model, plain_sgd(model), config_of(2))
    engine.backward(squared(engine, At(0, 0, 0)))
    other = [torch.zeros(6), torch.zeros(5).double(), torch.zeros(5, device="meta")]
    for wrong in other:
        with pytest.raises(PartitionError, match=r"head\.bias\.data of shape \(5,\)"):
            bias.data = wrong
    engine.step()
    frozen.data = frozen.data.double()
    assert frozen.dtype == torch.float64


@in_turn("stage, more", [(0, {}), (2, {}), (3, WHOLE)])
@on_each_rank(RANKS)
def test_a_frozen_parameter_cast_by_a_script_is_the_same_in_every_state(
    rank, model, stage, more, tmp_path
):
    frozen = model.blocks[0].up.bias.requires_grad_(False)
    zero = {"stage": stage, **more}
    engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=zero))
    engine.save_checkpoint(str(tmp_path), "before")
    before, name = frozen.detach().clone(), "blocks.0.up.bias"

    def assert_is(values):
        states = engine.state_dict(), dict(engine.consolidated()), model.state_dict()
        for state in states:
            assert torch.equal(state[name].float(), values.float())

    frozen.data = torch.linspace(0, 1, 64, dtype=torch.float64)
    assert frozen.dtype == torch.float64
    assert_is(torch.linspace(0, 1, 64, dtype=torch.float64))
    with torch.no_grad():
        frozen.fill_(2.0)
    assert_is(torch.full((64,), 2.0))
    engine.save_checkpoint(str(tmp_path), "after")
    frozen.data = torch.full((64,), 3.0, dtype=torch.bfloat16)
    engine.load_checkpoint(str(tmp_path), "after")
    assert_is(torch.full((64,), 2.0))
    engine.load_checkpoint(str(tmp_path), "before")
    assert_is(before)
    assert frozen.dtype == torch.float32
    for wrong in (torch.zeros(6), torch.zeros(64, device="meta")):
        with pytest.raises(PartitionError, match=r"up\.bias\.data of shape \(64,\)"):
            frozen.data = wrong
    run_steps(engine, rank, [1])
    assert_is(before)


def through_data(module, *_):
    module.weight.data[0, 0] = 0.5


def in_place(module, *_):
    with torch.no_grad():
        module.weight[0, 0] = 0.5


@in_turn("stage, writes", [(0, through_data), (2, through_data), (3, through_data), (2, in_place)])
@on_each_rank(1)
def test_writes_of_a_pass_with_changed_values_are_refused(rank, model, stage, writes):
    """After the pass they are kept."""

    def halve(views):
        for view in views.values():
            view.mul_(0.5)

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=zero))
    engine.schedule.changed_values.change(engine.flats, halve, "halved weights")
    want, layer = full_weights(engine), model.blocks[1].up
    hook = layer.register_forward_pre_hook(writes)
    for _ in range(2):
        with pytest.raises(PartitionError, match=r"up\.weight was written to .* halved weights"):
            squared(engine, At(0, 0, rank))
            engine.step()
    hook.remove()
    compare_tensors("weights", full_weights(engine), want, 0.0, 0.0)
    with hf_zero.GatheredParameters([layer.weight], modifier_rank=0):
        writes(layer)
    assert full_weights(engine)["blocks.1.up.weight"][0, 0] == 0.5
    squared(engine, At(1, 0, rank))


@in_turn("stage, offload", [(1, True), (2, False), (3, False)])
def test_a_graph_from_before_a_step_does_not_go_backward_after_it(stage, offload):
    """Plain PyTorch raises as well: weights that the backward reads have changed in place."""
    zero = {"stage": stage} | ({"offload_optimizer": CPU} if offload else {})

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=zero))
        for step in range(2):
            early = squared(engine, At(step, 1, rank))
            run_steps(engine, rank, [step])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                engine.backward(early)
            engine.zero_grad()
        return full_weights(engine)

    one, other = on_ranks(RANKS, run)
    compare_tensors("weights", one, other)


@in_turn(
    "stage, unfrozen_has_it, no_sync",
    ((0, 0, 0), (2, 0, 0), (3, 0, 0), (0, 1, 1), (0, 0, 1), (3, 0, 1)),
)
def test_a_gradient_that_a_script_has_set_outlives_an_unfreezing(stage, unfrozen_has_it, no_sync):
    """As in plain torch, the next backward adds to it."""

    def run(rank, model, given):
        frozen, name = model.blocks[0], f"blocks.{1 - unfrozen_has_it}.up.weight"
        weight = model.get_parameter(name)
        gradient = torch.ones_like(weight)
        frozen.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine = start(model, optimizer, config_of(stage, gradient_accumulation_steps=1 + no_sync))
        frozen.requires_grad_(True)
        if given:
            weight.grad = gradient
        for micro in range(1 + no_sync):
            with engine.no_sync() if micro < no_sync else nullcontext():
                engine.backward(squared(engine, At(0, micro, rank), torch.float32))
            engine.step()
        return full_weights(engine)[name]

    without, given = (on_ranks(2, run, given)[0] for given in (False, True))
    torch.testing.assert_close(without - given, torch.full_like(given, 0.05 / (1 + no_sync)))


def views_of_one_tensor():
    """The parameters of each layer of a stack are views of one tensor, as a joined weight's are."""
    model = seeded(Stack)
    joined = parameters_to_vector(model.parameters()).detach()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            part, joined = joined[: p.numel()].view_as(p), joined[p.numel() :]
            setattr(module, name, nn.Parameter(part))
    return model


UPDATED_EARLY = {"update_in_backward": True, "reduce_bucket_size": 0}
QUANTIZED = {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}


@in_turn("stage, more", [(0, {}), (2, UPDATED_EARLY), (3, UPDATED_EARLY), (3, QUANTIZED)])
def test_parameters_that_are_views_of_one_tensor_have_a_count_of_writes_each(stage, more):
    """An update of one is no write to the others; what a script writes to one is."""

    def run(rank, model):
        zero = {"stage": stage, **more}
        engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=zero))
        run_steps(engine, rank, range(2))
        with hf_zero.GatheredParameters([model.head.bias], modifier_rank=0), torch.no_grad():
            model.head.bias.fill_(0.5)
        run_steps(engine, rank, [2])
        return full_weights(engine)

    want = views_of_one_tensor()
    assert want.head.bias._version == want.head.weight._version
    optimizer = plain_sgd(want)
    for step in range(3):
        for rank in range(RANKS):
            (squared(want, At(step, 0, rank)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            want.head.bias.detach().fill_(0.5)
    if more is QUANTIZED:
        for one, other in zip(
            on_ranks(RANKS, run, build=views_of_one_tensor), on_ranks(RANKS, run), strict=True
        ):
            compare_tensors(QUANTIZED, one, other, tolerance=0.0)
    else:
        expect(values_of(want), run, build=views_of_one_tensor)


@on_each_rank(1, build=views_of_one_tensor)
def test_a_parameter_in_use_keeps_its_hooks_and_graphs_beside_views(rank, model):
    """Nor is a gradient from before ``initialize`` lost."""
    hooked, used, free = model.head.bias, model.head.weight, model.blocks[0].up.weight
    before = {p: p.detach().clone() for p in (hooked, used, free)}
    seen = []
    hooked.register_hook(seen.append)
    free.grad = torch.ones_like(free)
    loss = used.sum()
    engine = start(model, plain_sgd(model), config_of(1))
    (loss + 2 * hooked.sum()).backward()
    engine.step()
    assert len(seen) == 1
    for p, grad in ((hooked, 2.0), (used, 1.0), (free, 1.0)):
        torch.testing.assert_close(p.detach(), before[p] - 0.05 * grad)
