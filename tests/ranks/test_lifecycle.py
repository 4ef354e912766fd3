"""Engines one after another; a rank that reads the model alone; requires_grad that changes after
initialize; keys that decide what a step does; the device of an engine's threads.
"""

import threading
import time

import pytest
import torch
from torch import nn

from hf_zero.device import kinds
from hf_zero.distributed import rank_requests
from hf_zero.errors import PartitionError, RankMismatchError, UnusedParameterError
from hf_zero.offload.update import Updater
from hf_zero.zero.access.full import GatheredParameters
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_grads, full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.ranks.cases import expect, values_of

RANKS = 2


@on_each_rank(RANKS)
def test_names_of_the_engine(rank, model):
    engine = start(model, adamw(model), config_of(3, Plan(precision="bf16")))
    assert engine.stage == 3 and engine.config.precision == "bf16"
    assert (engine.global_rank, engine.world_size, engine.device.type) == (rank, RANKS, "cpu")
    assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu() * RANKS
    assert engine.module is model and engine.head is model.head
    with pytest.raises(AttributeError, match="no_such_name"):
        engine.no_such_name  # noqa: B018
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    run_steps(engine, rank, [0])
    engine.destroy(gather=True)
    assert all(p.isfinite().all() for p in model.parameters())


class OddBuffers(torch.nn.Linear):
    """A buffer in each layout that is not row by row, with values of the rank it is made for."""

    def __init__(self, rank):
        super().__init__(4, 1)
        start = 100.0 * rank
        self.register_buffer("turned", torch.arange(start, start + 6).reshape(2, 3).t())
        self.register_buffer("gaps", torch.arange(start, start + 6)[::2])
        self.register_buffer("expanded", torch.full((1, 2), start).expand(3, 2))
        self.register_buffer("conjugate", torch.tensor([1 + start * 1j]).conj())
        self.register_buffer("negative", torch.tensor([1 + start * 1j]).conj().imag)


def test_buffers_of_every_layout_have_rank_0s_values_and_are_not_cast():
    models = [OddBuffers(rank) for rank in range(RANKS)]

    def run(rank):
        before = {name: value.stride() for name, value in models[rank].named_buffers()}
        start(models[rank], None, config_of(3, Plan(precision="bf16")))
        wanted = dict(OddBuffers(0).named_buffers())
        for name, value in models[rank].named_buffers():
            assert torch.equal(value, wanted[name]) and value.stride() == before[name], name
            assert value.dtype == wanted[name].dtype, name

    run_ranks(RANKS, run)


@on_each_rank(RANKS, build=ARCHITECTURES["t5"].build)
def test_t5_keeps_in_fp32_what_transformers_keeps(rank, model):
    """``wo`` in fp16, as from_pretrained(dtype=float16) has it."""
    start(model, adamw(model), config_of(3, Plan(precision="fp16")))
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if ".wo." in name else torch.float16), name


# ---- a rank that reads alone ----


@in_turn("more", [{}, {"zero_quantized_weights": True}])
def test_others_go_on_with_a_forward(more):
    """Their gathers are recorded; planned ones are met in tests/gloo/test_endings.py."""

    def run(rank, model, alone):
        zero = {"stage": 3, **more}
        engine = start(model, adamw(model), config_of(3, zero_optimization=zero, timeout=60))
        states = []
        for step in range(3):
            if step == 0 and (rank == 0 or not alone):
                with GatheredParameters(model.head.weight):
                    states.append({"head.weight": model.head.weight.detach().clone()})
                states.append(engine.module.state_dict())
            run_steps(engine, rank, [step])
        return states, full_weights(engine)

    (states, want), _ = on_ranks(RANKS, run, False)
    (alone, weights), (_, of_the_other) = on_ranks(RANKS, run, True)
    for got, expected in zip(alone, states, strict=True):
        oracle.compare_tensors("read alone", got, expected, 0.0, 0.0)
    for got in (weights, of_the_other):
        oracle.compare_tensors("weights", got, want)


def test_one_that_ends_its_engine_serves_until_then():
    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, timeout=60))
        run_steps(engine, rank, range(2))
        want = full_weights(engine)
        if rank == 0:
            state = engine.module.state_dict()
            oracle.compare_tensors("read alone", {name: state[name] for name in want}, want)
            return
        while not engine.mesh.consensus.gathers.askers():
            time.sleep(0.01)
        engine.destroy()

    on_ranks(RANKS, run)


def test_the_reason_is_told_where_the_values_are_gone():
    gone = threading.Event()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, timeout=60))
        run_steps(engine, rank, range(1))
        if rank == 1:
            engine.destroy()
            gone.set()
            return
        assert gone.wait(60)
        with pytest.raises(RankMismatchError, match="rank 1 has destroyed its engine"):
            engine.module.state_dict()

    on_ranks(RANKS, run)


# ---- requires_grad ----


def partly_frozen():
    model = stack()
    model.blocks[1].requires_grad_(False)
    return model


def test_off_for_a_reference_and_on_again():
    """The trained are off and the frozen on during a forward without gradients."""

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(3))
        trains = [(p, p.requires_grad) for p in model.parameters()]
        for step in range(3):
            loss = squared(engine, At(step, 0, rank))
            for parameter, flag in trains:
                parameter.requires_grad = not flag
            assert all(parameter.requires_grad is not flag for parameter, flag in trains)
            with torch.no_grad():
                assert torch.equal(squared(engine, At(step, 0, rank)), loss)
            for parameter, flag in trains:
                parameter.requires_grad_(flag)
            engine.backward(loss)
            engine.step()
        return full_weights(engine)

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 3, RANKS, build=partly_frozen)
    expect(want, run, build=partly_frozen)


def test_a_backward_refuses_what_was_frozen_at_initialize():
    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(3))
        model.blocks[1].requires_grad_(True)
        for backward in (engine.backward, torch.Tensor.backward):
            with pytest.raises(PartitionError, match=r"requires_grad of blocks\.1\.\w+\.\w+"):
                backward(squared(engine, At(0, 0, rank)))
        model.blocks[1].requires_grad_(False)
        run_steps(engine, rank, [0])
        return full_weights(engine)

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]], RANKS, build=partly_frozen)
    expect(want, run, build=partly_frozen)


def every_other(model, at):
    """Other halves of the parameters in turn, from one micro-batch to the next."""
    for index, p in enumerate(model.parameters()):
        p.requires_grad_((index + at.micro) % 2 == 0)


def a_block(model, at):
    """All of it in the first steps, then one block less, whose optimizer state waits."""
    model.blocks[1].requires_grad_(at.step not in (1, 2))


def all_but_the_head(model, at):
    """No block has a backward in the first step."""
    model.requires_grad_(at.step > 0)
    model.head.requires_grad_(True)


@in_turn("stage, freeze", [(1, a_block), (3, every_other), (3, a_block), (3, all_but_the_head)])
def test_what_trains_may_be_frozen_for_a_while(stage, freeze):
    places = [At(step, micro, 0) for step in range(4) for micro in range(2)]
    plain = stack()
    optimizer = adamw(plain)
    for at in places:
        freeze(plain, at)
        for rank in range(RANKS):
            (squared(plain, At(at.step, at.micro, rank)) / (RANKS * 2)).backward()
        if at.micro == 1:
            optimizer.step()
            optimizer.zero_grad()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, gradient_accumulation_steps=2))
        for at in places:
            freeze(model, at)
            engine.backward(squared(engine, At(at.step, at.micro, rank)))
            engine.step()
        model.requires_grad_(True)
        return full_weights(engine)

    expect(values_of(plain), run)


@on_each_rank(RANKS)
def test_it_may_change_between_engines(rank, model):
    """This is the remedy that the error names."""
    start(model, adamw(model), config_of(3)).destroy()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    engine = start(model, plain_sgd(model.head), config_of(3))
    run_steps(engine, rank, [0])
    trained = {name for flat in engine.flats if flat.trainable for name in flat.parameters}
    assert trained == {"head.weight", "head.bias"}


# ---- keys that decide what a step does ----


@in_turn("stage, precision, prescale", [(0, "bf16", True), (2, "fp32", True), (3, "fp32", False)])
def test_gradients_are_summed_over_the_ranks_where_asked(stage, precision, prescale):
    plan = Plan(precision=precision, accumulation=2)

    def run(rank, model, operation):
        keys = {"gradient_allreduce_op": operation, "prescale_gradients": prescale}
        engine = start(model, adamw(model), config_of(stage, plan, **keys))
        for micro in range(2):
            engine.backward(squared(engine, At(0, micro, rank), plan.dtype))
            if micro == 0:
                engine.step()
        return full_grads(engine)

    mean, summed = (on_ranks(RANKS, run, operation)[0] for operation in ("mean", "sum"))
    for name, value in mean.items():
        torch.testing.assert_close(summed[name], value * RANKS, rtol=1e-2, atol=1e-4)


@in_turn("stage, away, lacking", [(0, 0, (0, 1)), (1, 1, (1,)), (3, 0, (1,))])
def test_a_parameter_without_a_gradient_is_an_error_on_all_ranks_where_asked(stage, away, lacking):
    def run(rank, model, ignore):
        zero = {"stage": stage, "ignore_unused_parameters": ignore}
        zero |= {"offload_optimizer": {"device": "cpu"}} if away else {}
        engine = start(model, adamw(model), config_of(0, zero_optimization=zero))
        run_steps(engine, rank, [0])
        if rank in lacking:
            model.head.forward = lambda x: x.mean(-1, keepdim=True)  # its weights are not used
        engine.backward(squared(engine, At(1, 0, rank)))
        if ignore:
            engine.step()
        else:
            with pytest.raises(UnusedParameterError, match=r"head\.weight, head\.bias got no grad"):
                engine.step()
        return full_weights(engine)

    want, _ = by_hand(adamw, [[(1.0, 0)]], RANKS)
    on_ranks(RANKS, run, True)
    for name, value in on_ranks(RANKS, run, False)[0].items():
        torch.testing.assert_close(value, want[name], rtol=2e-5, atol=1e-6)
    assert issubclass(UnusedParameterError, (PartitionError, AssertionError))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


@in_turn("leaf, units", [({}, 3), ({"leaf_module": {"classes": ["Experts"]}}, 0)])
@on_each_rank(1, build=lambda: nn.Sequential(Experts(), nn.Linear(4, 4)))
def test_modules_that_the_configuration_names_are_units(rank, model, leaf, units):
    zero = {"stage": 3, "stage3_module_granularity_threshold": 0, **leaf}
    engine = start(model, adamw(model), config_of(0, zero_optimization=zero))
    labels = [unit.label for unit in engine.units]
    assert len([label for label in labels if "experts" in label]) == units
    assert units or "0" in labels


@pytest.mark.parametrize(
    "stage, where, name, thread",
    [
        (2, Updater, "_run", "hf-zero update"),
        (3, rank_requests, "_serve_until_closed", "hf_zero-serve"),
    ],
)
def test_the_device_is_set_first(stage, where, name, thread, tmp_path, monkeypatch):
    current, worked = threading.local(), []
    monkeypatch.setattr(kinds, "set_device", lambda device: setattr(current, "device", device.type))
    work = getattr(where, name)

    def watched(*args):
        worked.append((threading.current_thread().name, getattr(current, "device", None)))
        return work(*args)

    monkeypatch.setattr(where, name, watched)

    def run(rank, model):
        section = offload("optimizer on cpu", stage, tmp_path)
        engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=section))
        run_steps(engine, rank, range(2))
        engine.destroy()

    on_ranks(2, run)
    assert len(worked) >= 2
    assert all(who.startswith(thread) and device == "cpu" for who, device in worked), worked
