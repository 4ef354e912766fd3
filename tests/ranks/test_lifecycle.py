"""Engines and the models that they are given: a rank that reads alone; requires_grad that changes
after initialize, and what an engine keeps that is built again for it; keys that decide what a step
does; models that are sharded before their training is configured.
"""

from __future__ import annotations

import copy
import errno
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint import background_saves
from hf_zero.config import ZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed import shard_fetches
from hf_zero.errors import (
    CheckpointError,
    ConfigError,
    OffloadError,
    PartitionError,
    ReleasedParameterError,
    UnusedParameterError,
)
from hf_zero.loading.shard_only import hold
from hf_zero.offload.update import OffloadedUpdater
from hf_zero.zero.access.gathered_parameters import GatheredParameters
from hf_zero.zero.layout.parameter import ReleasedParameter
from hf_zero.zero.training_engine import TrainingEngine
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, layers, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd, trainable
from tests.ranks.cases import expect, trains_alike, values_of
from tests.ranks.test_offload_faults import inject
from tests.ranks.test_trainable_set import all_of, refuse
from tests.ranks.test_whole_state import ROWS, Scaled, batch, settings, train

RANKS = 2


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


class Untouchable(nn.Module):
    """Every property raises: each attribute that this class and torch's do not have is one."""

    def __getattr__(self, name: str) -> Any:
        for table in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(table, ()):
                return self.__dict__[table][name]
        if name.startswith("__") or name in ("kernel", "layers", "table"):  # torch asks for them
            raise AttributeError(name)
        raise RuntimeError(f"the property {name} of the user's module was read")

    config = device = dtype = weight = bias = base_model = property(lambda self: self.some)


class UntouchableLayer(Untouchable):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 8) / 4)
        self.register_buffer("table", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.kernel + self.table)


class UntouchableModel(Untouchable):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(UntouchableLayer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@in_turn("stage, kernels", [(0, "off"), (1, "auto"), (2, "off"), (3, "off"), (3, "auto")])
@on_each_rank(RANKS, build=UntouchableModel)
def test_no_property_of_the_model_is_read(rank, model, stage, kernels):
    engine = hf_zero.initialize(
        model=model, optimizer=plain_sgd(model), config=config_of(stage, kernels=kernels)
    )[0]

    def step() -> None:
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()

    step()
    engine.state_dict()
    model.layers[0].requires_grad_(False)
    step()
    model.layers[0].requires_grad_(True)
    step()  # rebuilt
    engine.destroy()


class CountedRuns(nn.Module):
    """A parametrization that counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return weight * 1.0


@in_turn("stage", range(4))
@on_each_rank(RANKS, build=layers)
def test_only_forwards_run_parametrizations(rank, model, stage):
    counted = CountedRuns()
    nn.utils.parametrize.register_parametrization(model[2], "weight", counted)
    counted.runs.zero_()
    engine = hf_zero.initialize(model=model, optimizer=plain_sgd(model), config=config_of(stage))[0]
    assert counted.runs == 0
    for _ in range(2):
        before = float(counted.runs)
        loss = engine(torch.ones(2, 8)).square().mean()
        assert counted.runs == before + 1
        engine.backward(loss)
        engine.step()
    engine.state_dict()
    engine.destroy()
    assert counted.runs == 2


def test_a_read_through_a_destroyed_engine_is_refused_at_once() -> None:
    def run(rank: int) -> None:
        model = stack()
        holder = hold(model, ZeroConfig(stage=3))
        weight = next(model.parameters())
        assert weight.add(0).shape == weight.shape  # gathers
        holder.destroy()  # it is still referred to
        with pytest.raises(ReleasedParameterError, match="was destroyed"):
            weight.add(0)
        with pytest.raises(ReleasedParameterError, match="was destroyed"):
            copy.deepcopy(weight)
        consensus = holder.mesh.consensus
        for fetch in (consensus.fetches.fetch, consensus.fetches.fetch_alone):
            with pytest.raises(PartitionError, match="that it has destroyed"):
                fetch(0, "a unit", [1 - rank], 1)
        with pytest.raises(PartitionError, match="that it has destroyed"):
            holder.schedule.pin(holder.units[0])

    run_ranks(RANKS, run)


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


class PartlyFrozen(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)


def test_initialize_returns_once_every_rank_has_made_its_engine(monkeypatch):
    """A rank that returned could destroy its engine, to which others are still connecting."""
    build, returned = TrainingEngine._build, threading.Event()

    def slow(engine, plan, mesh, installed):
        build(engine, plan, mesh, installed)
        if mesh.rank == 1:
            early.append(returned.wait(1.0))

    def run(rank, model):
        start(model, plain_sgd(model), config_of(1))
        returned.set()

    early: list[bool] = []
    monkeypatch.setattr(TrainingEngine, "_build", slow)
    on_ranks(RANKS, run)
    assert early == [False]


def test_off_for_a_reference_and_on_again():
    """The trained are off and the frozen on during a forward without gradients."""

    def micro(net, at):
        loss = squared(net, at)
        trains = [(p, p.requires_grad) for p in net.module.parameters()]
        for parameter, flag in trains:
            parameter.requires_grad = not flag
        assert all(parameter.requires_grad is not flag for parameter, flag in trains)
        with torch.no_grad():
            assert torch.equal(squared(net, at), loss)
        for parameter, flag in trains:
            parameter.requires_grad_(flag)
        net.backward(loss)
        return loss

    trains_alike(micro, 3, make=PartlyFrozen)


def test_a_backward_refuses_what_was_frozen_at_initialize():
    def micro(net, at):
        if hasattr(net, "engine"):
            net.module.blocks[1].requires_grad_(True)
            for backward in (net.engine.backward, torch.Tensor.backward):
                with pytest.raises(PartitionError, match=r"requires_grad of blocks\.1\.\w+\.\w+"):
                    backward(squared(net, at))
            net.module.blocks[1].requires_grad_(False)
        loss = squared(net, at)
        net.backward(loss)
        return loss

    trains_alike(micro, 3, Plan(RANKS, 1), make=PartlyFrozen)


@in_turn("stage, away, lacking", [(0, 0, (0, 1)), (3, 1, (1,))])
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


@in_turn(
    "stage, where, name, thread",
    [
        (2, OffloadedUpdater, "_run", "hf-zero update"),
        (3, shard_fetches, "_serve_until_closed", "hf_zero-serve"),
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


@torch.no_grad()
def answer(net, rank):
    return squared(net, At(0, 0, rank))


@in_turn("stage, bf16", [(1, True), (3, False)])
def test_a_held_model_keeps_its_dtype_and_is_taken_over(stage, bf16):
    """In 16 bits nothing of its fp32 values is lost."""

    def run(rank, model):
        held = hold(model, ZeroConfig(stage=stage), stage)
        assert (held.stage, {p.dtype for p in model.parameters()}) == (stage, {torch.float32})
        assert {type(p) is ReleasedParameter for p in model.parameters()} == {stage == 3}
        assert torch.equal(answer(held, rank), answer(stack(), rank))
        engine = start(model, plain_sgd(model), config_of(stage, bf16={"enabled": bf16}))
        for flat in held.flats:
            assert not any(flat.shard_bytes().values()) and not flat.views, "its memory is kept"
        assert held.mesh.shard._group is None, "its process groups are left behind"
        run_steps(engine, rank, range(0 if bf16 else 2))
        return full_weights(engine)

    want = values_of(stack()) if bf16 else by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)[0]
    expect(want, run, **({"tolerance": 0.0, "floor": 0.0} if bf16 else {}))


@on_each_rank(RANKS)
def test_it_may_be_frozen_copied_and_read_before_it_is_trained(rank, model):
    """A view that one rank keeps changes nothing of what all ranks do together."""
    plain = values_of(model)
    hold(model, ZeroConfig(stage=3))
    with GatheredParameters(model.head.weight):
        kept = model.head.weight.detach() if rank == 0 else plain["head.weight"]
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    whole = copy.deepcopy(model.head)  # as adapters do with modules that are saved whole
    assert {type(p) for p in whole.parameters()} == {nn.Parameter}
    assert torch.equal(whole.weight, plain["head.weight"])
    norm = float(model.blocks[0].up.weight.norm())
    assert norm == pytest.approx(float(plain["blocks.0.up.weight"].norm()))
    with pytest.raises(ReleasedParameterError, match=r"blocks\.2\.up\.weight"), torch.no_grad():
        model.blocks[2].up.weight.zero_()
    model.extra = whole
    engine = start(model, torch.optim.SGD(trainable(model), lr=0.1), config_of(3))
    trained = {name for flat in engine.flats if flat.trainable for name in flat.parameters}
    assert trained == {"head.weight", "head.bias", "extra.weight", "extra.bias"}
    assert torch.equal(kept, plain["head.weight"]), "the view lost its memory"
    found = full_weights(engine)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@on_each_rank(RANKS)
def test_data_of_another_shape_is_told(rank, model):
    hold(model, ZeroConfig(stage=3))
    with (
        pytest.raises(PartitionError, match=r"head\.weight of shape \(5, 32\)"),
        GatheredParameters(model.head.weight),
    ):
        model.head.weight.data = torch.zeros(7, 32)
    assert model.head.weight.shape == (5, 32) and type(model.head.weight) is ReleasedParameter


def half_frozen(stage: int, **config: Any) -> tuple[Any, Any]:
    """A model whose first layer is frozen, and an engine whose optimizer has all parameters."""
    model = Scaled()
    optimizer = torch.optim.AdamW(all_of(model, None, 0), 1e-2)
    config = settings(stage) | config
    return model, hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_sent_anew(stage: int) -> None:
    def run(rank: int) -> None:
        model, engine = half_frozen(stage)

        def sent() -> set[str]:
            return {name for each in engine.iter_weights(changed_only=True) for name, _ in each}

        train(engine, rank, range(1))
        assert sent() == {*engine.state_dict()}
        model[0].requires_grad_(True)
        stream = engine.iter_weights()
        train(engine, rank, range(1, 2))
        refuse("written", lambda: next(iter(stream)))
        assert sent() == {*engine.state_dict()} and not sent()
        engine.destroy()

    run_ranks(RANKS, run)


def test_a_save_in_the_window_of_the_change(tmp_path: Path) -> None:
    """It holds the place in the data at which the window began."""
    data, found = torch.cat([batch(step) for step in range(4)]), []
    for resume in (None, str(tmp_path)):
        model = Scaled()
        optimizer = torch.optim.AdamW(all_of(model, None, 0), 1e-2)
        model[0].requires_grad_(resume is not None)
        engine, _, loader, _ = hf_zero.initialize(
            model=model, optimizer=optimizer, config=settings(1), training_data=data, resume=resume
        )
        for number, rows in enumerate(loader, engine.global_steps):
            model[0].requires_grad_(number >= 2)
            loss = engine(rows).square().mean()
            engine.backward(loss)
            if number == 2 and resume is None:
                engine.save_checkpoint(str(tmp_path))
            engine.step()
        found.append((engine.global_steps, [*engine.state_dict().values()]))
        engine.destroy()
    (steps, weights), (again, resumed) = found
    assert steps == again == 8 and all(map(torch.equal, weights, resumed))


def test_writes_that_fail_before_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in the background, and offloaded state on a disk that is full."""
    section = offload("optimizer in files", 2, tmp_path)
    model, engine = half_frozen(2, zero_optimization=section)

    def full(path: Path, *rest: Any) -> Any:
        raise OSError(errno.ENOSPC, "full", str(path))

    train(engine, 0, range(1))
    with monkeypatch.context() as patched:
        patched.setattr(background_saves, "write_image", full)
        engine.save_checkpoint(str(tmp_path / "run"), blocking=False)
        refuse("disk is full", lambda: engine.replace(model[4]), CheckpointError)
    engine.replace(model[4])
    train(engine, 0, range(1, 2))
    assert not engine.optimizer_step.failed_writes()  # all have ended
    inject(engine, "write:1+:ENOSPC")
    train(engine, 0, range(2, 3))
    refuse("save a checkpoint now", lambda: engine.replace(model[4]), OffloadError)
    engine.save_checkpoint(str(tmp_path / "run"))
    with suppress(OSError):
        engine.destroy()


@pytest.mark.parametrize("way", ["the engine", "a module"])
def test_blocks_stay_compiled(way: str) -> None:
    model, ran = stack(), list[int]()
    model.enter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=settings(3))[0]

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (ran.append(1), graph.forward(*args))[1]

    (engine if way == "the engine" else model.blocks[1]).compile(backend=backend)
    run_steps(engine, 0, range(1))
    once = len(ran)
    model.enter.requires_grad_(True)
    run_steps(engine, 0, range(1, 2))
    assert once and len(ran) == 2 * once
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_graphs_of_the_former_engine(stage: int) -> None:
    def run(rank: int) -> None:
        model, engine = half_frozen(stage)
        replace = partial(engine.replace, model[4])
        handle = model[2].register_forward_hook(
            lambda *_: refuse("inside a forward or backward", replace)
        )
        train(engine, rank, range(1))
        former = engine(batch(1)[:ROWS]).square().mean()
        handle.remove()
        model[0].requires_grad_(True)
        loss = former + engine(batch(1)[:ROWS]).square().mean()
        refuse("run the forward again", lambda: engine.backward(loss))
        engine.restart_window()
        train(engine, rank, range(1, 2))
        assert engine.global_steps == 2
        engine.destroy()

    run_ranks(RANKS, run)


def test_statistics_in_another_dtype() -> None:
    model, engine = half_frozen(2, bf16={"enabled": True})
    run = partial(engine, batch(0).bfloat16())
    run()
    model[3] = nn.BatchNorm1d(16)
    refuse("running statistics", lambda: engine.replace(model[3], 0), ConfigError)
    model[3] = nn.Tanh()
    engine.backward(run().mean())
    engine.step()
    engine.destroy()


PHASES = {"phases": [{"steps": 3, "train_batch_size": 12}, {}], "lr_scaling_method": "sqrt"}
BITS = {
    "enabled": True,
    "quantize_bits": {"start_bits": 16, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 1,
}
TECHNIQUES = {
    "training_phases": {"training_phases": PHASES, "gradient_accumulation_steps": 2},
    "quantize_training": {"quantize_training": BITS},
}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_techniques_go_on(technique: str) -> None:
    """An engine that is built again without any change trains bit for bit as one that is not."""
    found = []
    for changes in ((), (2, 4)):
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        config = settings(1, train_micro_batch_size_per_gpu=3) | TECHNIQUES[technique]
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        seen = []
        for step in range(6):
            if step in changes:
                engine.replace(model.head)
            run_steps(engine, 0, [step], engine.gradient_accumulation_steps())
            seen.append((engine.train_batch_size(), engine.get_lr()))
        found.append((seen, [*engine.state_dict().values()]))
        engine.destroy()
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
