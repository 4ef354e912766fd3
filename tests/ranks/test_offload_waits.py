"""An update that is still under way: whoever reads what it changes waits for it, and nobody
waits for more.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.optim.sub_group_update import Update
from hf_zero.parameters.parameter import UpdatingParameter
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan, adamw

LLAMA = ARCHITECTURES["llama"]


class Gate:
    """Holds every update up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        run = Update.run

        def held_up(update, flat, place, placed):
            assert self.open.wait(30)
            run(update, flat, place, placed)

        monkeypatch.setattr(Update, "run", held_up)


def train(engine, step: int, rank: int = 0) -> None:
    engine.backward(engine(**LLAMA.batch(step, 0, rank)).loss)
    engine.step()


def opened(folder, stage: int = 2, way: str = "optimizer on cpu", **more):
    model = LLAMA.build()
    return start(
        model,
        adamw(model),
        config_of(stage, Plan(clip=1.0), zero_optimization=offload(way, stage, folder), **more),
    )


@pytest.fixture
def expected(tmp_path):
    """Weights after one step on the device."""
    engine = opened(tmp_path)
    train(engine, 0)
    weights = full_weights(engine)
    engine.destroy()
    return weights


READS = {
    "a parameter": lambda engine, name, parameter: parameter.detach().clone(),
    "its data": lambda engine, name, parameter: parameter.data.clone(),
    "a sum over it": lambda engine, name, parameter: parameter * 1.0,
    "a list of them": lambda engine, name, parameter: torch._foreach_mul([parameter], 1.0)[0],
    "a copy of the model": lambda engine, name, parameter: copy.deepcopy(
        engine.module
    ).get_parameter(name),
    "a state dict": lambda engine, name, parameter: engine.state_dict()[name],
    "the consolidated model": lambda engine, name, parameter: dict(engine.consolidated())[name],
    "master weights": lambda engine, name, parameter: hf_zero.safe_get_full_fp32_param(parameter),
    "inside GatheredParameters": lambda engine, name, parameter: gathered(parameter),
    "numbers": lambda engine, name, parameter: torch.tensor(parameter.tolist()),
}


def gathered(parameter):
    with hf_zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


@pytest.mark.parametrize("what", READS)
def test_readers_get_the_values_of_the_step(what, expected, tmp_path, monkeypatch):
    engine = opened(tmp_path)
    gate = Gate(monkeypatch)
    train(engine, 0)
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = engine.module.get_parameter(name)
    assert (
        type(parameter) is UpdatingParameter
        and parameter.shape == (parameter.size(0), parameter.size(1))
        and parameter.requires_grad
    )
    threading.Timer(0.05, gate.open.set).start()
    assert torch.equal(READS[what](engine, name, parameter).detach(), expected[name])
    engine.destroy()


def test_step_returns_while_units_are_updated_and_a_forward_waits_unit_by_unit(
    tmp_path, monkeypatch
):
    """The forward of the first unit runs while the last one is still being updated."""
    engine = opened(tmp_path)
    train(engine, 0)
    engine.updater.finish()
    order, run = [], Update.run
    unit_of = {flat.optimizer_shard: flat.unit for flat in engine.flats}
    last = threading.Event()

    def held_up(update, shard, place, placed):
        if unit_of[shard] is engine.updater._order[-1]:
            assert last.wait(30)
        run(update, shard, place, placed)
        order.append(unit_of[shard])

    monkeypatch.setattr(Update, "run", held_up)
    train(engine, 1)
    assert engine.updater.pending
    reached = []
    for unit in engine.units:
        unit.module.register_forward_hook(
            lambda module, args, output, label=unit.label: reached.append(label)
        )
    blocks = [unit for unit in engine.updater._order if unit.label.startswith("model.layers")]
    assert [unit.label for unit in blocks] == ["model.layers.0", "model.layers.1"]
    blocks[1].module.register_forward_pre_hook(lambda module, args: last.set(), prepend=True)
    assert engine.updater._order[-1] is blocks[1], "it is needed last"
    train(engine, 2)
    assert reached[0] == "model.layers.0" and order[-1] is not None
    engine.destroy()


def _one_rank_looks(rank, models, folder, gate):
    model = models[rank]
    section = offload("optimizer on cpu", 2, folder)
    engine = start(
        model, adamw(model), config_of(2, Plan(ranks=2, clip=1.0), zero_optimization=section)
    )
    train(engine, 0, rank)
    waiting = set(engine.updater.pending) == {unit for unit in engine.units if unit.trainable}
    dist.barrier()
    gate.set()
    if rank == 0:  # an evaluation that the others do not join
        with torch.no_grad():
            engine(**LLAMA.batch(5, 0, 0))
    dist.barrier()
    weights = {
        name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()
    }
    engine.destroy()
    return waiting, weights


def test_whole_parameters_are_gathered_as_they_are_updated_without_anybodys_forward(
    tmp_path, monkeypatch
):
    """Stage 2 on two ranks: step returns before the gathers; one rank may go on alone."""
    gate = Gate(monkeypatch).open
    seen = run_ranks(2, _one_rank_looks, [LLAMA.build() for _ in range(2)], tmp_path, gate)
    assert all(waiting for waiting, _ in seen)
    for name, weights in seen[0][1].items():
        assert torch.equal(weights, seen[1][1][name]), name


def test_a_schedule_that_sets_the_next_rate_at_once_does_not_change_the_step(
    expected, tmp_path, monkeypatch
):
    engine = opened(tmp_path)
    gate = Gate(monkeypatch)
    train(engine, 0)
    for group in engine.optimizer.param_groups:
        group["lr"], group["weight_decay"], group["betas"] = 100.0, 5.0, (0.0, 0.0)
    gate.open.set()
    for name, weights in full_weights(engine).items():
        assert torch.equal(weights, expected[name]), name
    engine.destroy()


def test_an_error_of_the_update_reaches_whoever_waits_for_it(tmp_path, monkeypatch):
    engine = opened(tmp_path)

    def broken(update, flat, place, placed):
        raise OSError(5, "Input/output error", "/disk")

    monkeypatch.setattr(Update, "run", broken)
    train(engine, 0)
    with pytest.raises(OSError, match="Input/output error"):
        engine(**LLAMA.batch(1, 0, 0))
    with pytest.raises(OSError, match="Input/output error"):
        engine.module.model.layers[0].mlp.up_proj.weight.sum()


def _checkpoint_after(rank, models, folder, section):
    model = models[rank]
    engine = start(
        model,
        adamw(model),
        config_of(section["stage"], Plan(ranks=2, clip=1.0), zero_optimization=section),
    )
    train(engine, 0, rank)
    engine.save_checkpoint(folder)
    train(engine, 1, rank)
    weights = full_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage, way", [(1, "optimizer on cpu"), (3, "all in files")])
def test_a_checkpoint_right_after_a_step_holds_that_step(stage, way, tmp_path):
    """It resumes without offload, and trains on to the same weights."""
    away = tmp_path / "away"
    away.mkdir()
    models = [LLAMA.build() for _ in range(2)]
    want = run_ranks(
        2, _checkpoint_after, models, str(tmp_path / "saved"), offload(way, stage, away)
    )[0]

    def resume(rank, models):
        model = models[rank]
        engine = start(
            model,
            adamw(model),
            config_of(stage, Plan(ranks=2, clip=1.0), zero_optimization=offload(way, stage, away)),
        )
        engine.load_checkpoint(str(tmp_path / "saved"))
        train(engine, 1, rank)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    got = run_ranks(2, resume, [LLAMA.build() for _ in range(2)])[0]
    for name, weights in want.items():
        assert torch.equal(weights, got[name]), name


@pytest.mark.parametrize("way", ["all on cpu", "optimizer in files"])
def test_a_thread_that_reads_for_other_ranks_waits_by_itself(way, tmp_path, monkeypatch):
    """The thread that trains has to wait all the same: in its stream, and under its watch."""
    engine = opened(tmp_path, 3, way)
    train(engine, 0)
    engine.updater.finish()
    unit = engine.units[1]
    before = unit.chunk_bytes()
    gate = Gate(monkeypatch)
    train(engine, 1)
    finished = []
    finish = engine.updater.finish
    monkeypatch.setattr(
        engine.updater,
        "finish",
        lambda *units: (finished.append(threading.current_thread().name), finish(*units))[1],
    )
    answers = []
    reader = threading.Thread(target=lambda: answers.append(unit.chunk_bytes()), name="reader")
    reader.start()
    reader.join(0.05)
    assert not answers
    gate.open.set()
    reader.join(30)
    assert "reader" not in finished and unit in engine.updater.pending
    own = b"".join(flat.shard.detach().view(torch.uint8).numpy().tobytes() for flat in unit.sharded)
    assert answers == [own] and own != before
    engine.destroy()
