"""Engines side by side and one after another; a rank that reads the model alone; requires_grad
that changes after initialize; keys that decide what a step does; the device of an engine's
threads.
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
from tests.helpers.engines import STAGES, config_of, full_grads, full_weights, start
from tests.helpers.models import ARCHITECTURES, seeded
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd, sgd

RANKS = 2


def test_two_engines_side_by_side():
    """A policy and its reference at different stages, stepped in turn."""
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 3, RANKS)
    others = [stack() for _ in range(RANKS)]

    def run(rank, model):
        one = start(model, plain_sgd(model), config_of(3))
        two = start(others[rank], plain_sgd(others[rank]), config_of(2))
        for step in range(3):
            loss_one, loss_two = squared(one, At(step, 0, rank)), squared(two, At(step, 0, rank))
            two.backward(loss_two)
            one.backward(loss_one)
            one.step()
            two.step()
        return full_weights(one), full_weights(two)

    for weights in on_ranks(RANKS, run):
        for each in weights:
            oracle.compare_tensors("weights", each, want)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_bf16_destroy_and_names_of_the_engine(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage, Plan(precision="bf16")))
    assert engine.stage == stage and engine.config.precision == "bf16"
    assert (engine.global_rank, engine.world_size, engine.device.type) == (rank, RANKS, "cpu")
    assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu() * RANKS
    assert engine.module is model
    assert engine.head is model.head
    with pytest.raises(AttributeError, match="no_such_name"):
        engine.no_such_name  # noqa: B018
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    run_steps(engine, rank, [0])
    engine.destroy(gather=True)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_neither_cast_nor_sharded(stage):
    before = {name: value.clone() for name, value in ARCHITECTURES["llama"].build().named_buffers()}
    assert before

    def run(rank, model):
        start(model, adamw(model), config_of(stage, Plan(precision="bf16")))
        for name, value in model.named_buffers():
            assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name

    on_ranks(RANKS, run, build=ARCHITECTURES["llama"].build)


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


def test_buffers_of_every_layout_have_rank_0s_values():
    models = [OddBuffers(rank) for rank in range(RANKS)]

    def run(rank):
        before = {name: value.stride() for name, value in models[rank].named_buffers()}
        start(models[rank], None, config_of(3))
        wanted = dict(OddBuffers(0).named_buffers())
        for name, value in models[rank].named_buffers():
            assert torch.equal(value, wanted[name]) and value.stride() == before[name], name

    run_ranks(RANKS, run)


@on_each_rank(RANKS, build=ARCHITECTURES["t5"].build)
def test_t5_keeps_in_fp32_what_transformers_keeps(rank, model):
    """``wo`` in fp16, as from_pretrained(dtype=float16) has it."""
    start(model, adamw(model), config_of(3, Plan(precision="fp16")))
    for name, p in model.named_parameters():
        kept = ".wo." in name
        assert p.dtype == (torch.float32 if kept else torch.float16), name


def test_a_model_without_parameters_to_train_is_told():
    def frozen():
        return seeded(lambda: stack().requires_grad_(False))

    def run(rank, model):
        engine = start(model, None, config_of(3))
        with torch.no_grad():
            assert torch.isfinite(squared(engine, At(0, 0, rank)))

    on_ranks(RANKS, run, build=frozen)


def trained(engine, rank, steps, read=lambda step: None):
    for step in range(steps):
        read(step)
        run_steps(engine, rank, [step])


@pytest.mark.parametrize("more", [{}, {"zero_quantized_weights": True}], ids=["", "rounded"])
def test_others_go_on_with_a_forward(more):
    """Their gathers are recorded; planned ones are met in tests/gloo/test_endings.py."""

    def run(rank, model, alone):
        zero = {"stage": 3, **more}
        engine = start(model, adamw(model), config_of(3, zero_optimization=zero, timeout=60))
        states = []

        def read(step):
            if step == 0 and (rank == 0 or not alone):
                with GatheredParameters(model.head.weight):
                    states.append({"head.weight": model.head.weight.detach().clone()})
                states.append(engine.module.state_dict())

        trained(engine, rank, 4, read)
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
        trained(engine, rank, 2)
        want = full_weights(engine)
        if rank == 0:
            return engine.module.state_dict(), want
        while not engine.mesh.consensus.gathers.askers():
            time.sleep(0.01)
        engine.destroy()
        return {}, want

    (state, want), _ = on_ranks(RANKS, run)
    oracle.compare_tensors("read alone", {name: state[name] for name in want}, want)


def test_the_reason_is_told_where_the_values_are_gone():
    gone = threading.Event()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, timeout=60))
        trained(engine, rank, 1)
        if rank == 1:
            engine.destroy()
            gone.set()
            return
        assert gone.wait(60)
        with pytest.raises(RankMismatchError, match="rank 1 has destroyed its engine"):
            engine.module.state_dict()

    on_ranks(RANKS, run)


def partly_frozen():
    model = stack()
    model.blocks[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", STAGES)
def test_off_for_a_reference_and_on_again(stage):
    """During a forward without gradients the trained parameters are off and the frozen ones on;
    training continues unaffected.
    """
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 3, RANKS, build=partly_frozen)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
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

    for weights in on_ranks(RANKS, run, build=partly_frozen):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_refuses_what_was_frozen_at_initialize(stage):
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]], RANKS, build=partly_frozen)
    name = r"blocks\.1\.\w+\.\w+"

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        model.blocks[1].requires_grad_(True)
        with pytest.raises(
            PartitionError,
            match=rf"requires_grad of {name} is True in this backward and was False.*destroy",
        ):
            engine.backward(squared(engine, At(0, 0, rank)))
        with pytest.raises(PartitionError, match=name):
            squared(engine, At(0, 0, rank)).backward()
        model.blocks[1].requires_grad_(False)
        run_steps(engine, rank, [0])
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=partly_frozen):
        oracle.compare_tensors("weights", weights, want)


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


@pytest.mark.turns
@pytest.mark.parametrize("freeze", [every_other, a_block, all_but_the_head])
@pytest.mark.parametrize("stage", STAGES)
def test_what_trains_may_be_frozen_for_a_while(stage, freeze):
    plain = stack()
    optimizer = adamw(plain)
    for step in range(4):
        for micro in range(2):
            freeze(plain, At(step, micro, 0))
            for rank in range(RANKS):
                (squared(plain, At(step, micro, rank)) / (RANKS * 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {name: p.detach() for name, p in plain.named_parameters()}

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, gradient_accumulation_steps=2))
        for step in range(4):
            for micro in range(2):
                freeze(model, At(step, micro, rank))
                engine.backward(squared(engine, At(step, micro, rank)))
                engine.step()
        model.requires_grad_(True)
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_it_may_change_between_engines(rank, model, stage):
    """This is the remedy that the error names."""
    start(model, adamw(model), config_of(stage)).destroy()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    engine = start(model, plain_sgd(model.head), config_of(stage))
    run_steps(engine, rank, [0])
    assert {name for flat in engine.flats if flat.trainable for name in flat.parameters} == {
        "head.weight",
        "head.bias",
    }


@pytest.mark.turns
@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_summed_over_the_ranks_where_asked(stage, precision, prescale):
    plan = Plan(precision=precision, accumulation=2)

    keys = {"prescale_gradients": prescale}

    def run(rank, model, operation):
        config = config_of(stage, plan, gradient_allreduce_op=operation, **keys)
        engine = start(model, adamw(model), config)
        for micro in range(2):
            engine.backward(squared(engine, At(0, micro, rank), plan.dtype))
            if micro == 0:
                engine.step()
        grads = full_grads(engine)
        engine.destroy()
        return grads

    mean, summed = (on_ranks(RANKS, run, operation)[0] for operation in ("mean", "sum"))
    for name, value in mean.items():
        torch.testing.assert_close(summed[name], value * RANKS, rtol=1e-2, atol=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize("lacking", [(0, 1), (1,)])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_a_gradient_is_an_error_on_all_ranks_where_asked(
    stage, offload, lacking
):
    def run(rank, model, ignore):
        zero = {"stage": stage, "ignore_unused_parameters": ignore, **(offload if stage else {})}
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
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want, _ = by_hand(adamw, [[(1.0, 0)]], RANKS)
    on_ranks(RANKS, run, True)
    stayed = on_ranks(RANKS, run, False)[0]
    for name, value in stayed.items():
        torch.testing.assert_close(value, want[name], rtol=2e-5, atol=1e-6)
    assert issubclass(UnusedParameterError, (PartitionError, AssertionError))


def test_modules_that_the_configuration_names_are_units():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    def run(rank, model, leaf):
        zero = {"stage": 3, "stage3_module_granularity_threshold": 0, **leaf}
        engine = start(model, adamw(model), config_of(0, zero_optimization=zero))
        units = [unit.label for unit in engine.units]
        engine.destroy()
        return units

    def build():
        return nn.Sequential(Experts(), nn.Linear(4, 4))

    plain = on_ranks(RANKS, run, {}, build=build)[0]
    marked = on_ranks(RANKS, run, {"leaf_module": {"classes": ["Experts"]}}, build=build)[0]
    assert len([label for label in plain if "experts" in label]) == 3
    assert "0" in marked and not [label for label in marked if "experts" in label]


def train(rank, models, section):
    engine = start(
        models[rank],
        sgd(models[rank]),
        config_of(section["stage"], Plan(ranks=len(models)), zero_optimization=section),
    )
    for step in range(2):
        engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, 0, rank)).loss)
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    "stage, where, thread", [(2, Updater, "hf-zero update"), (3, rank_requests, "hf_zero-serve")]
)
def test_the_device_is_set_first(stage, where, thread, tmp_path, monkeypatch):
    current, worked = threading.local(), []
    monkeypatch.setattr(kinds, "set_device", lambda device: setattr(current, "device", device.type))
    name = "_run" if where is Updater else "_serve_until_closed"
    work = getattr(where, name)

    def watched(*args):
        worked.append((threading.current_thread().name, getattr(current, "device", None)))
        return work(*args)

    monkeypatch.setattr(where, name, watched)
    models = [ARCHITECTURES["gpt2"].build() for _ in range(2)]
    run_ranks(2, train, models, offload("optimizer on cpu", stage, tmp_path))
    assert len(worked) >= 2 and all(
        who.startswith(thread) and device == "cpu" for who, device in worked
    ), worked
