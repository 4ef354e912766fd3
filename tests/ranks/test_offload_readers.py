"""Readers of a parameter, a master weight or a moment right after ``step()`` wait for the update
that is still under way; a load of weights alone does not mend an update in the backward.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from inspect import getclosurevars
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint import convert_checkpoint
from hf_zero.device import streams
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.zero import sharded_model
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter import OwnedParameter, UpdatingParameter
from tests.helpers.cells import in_turn
from tests.helpers.models import Stack, features, seeded
from tests.helpers.offloads import DEVICE, PLACES, offload, opened, same, train, trained
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, squared
from tests.helpers.training import At, adamw

NAME = "blocks.1.up.weight"


def weight(engine):
    return engine.module.blocks[1].up.weight


def saved(engine, folder):
    engine.save_checkpoint(str(folder / "run"))
    convert_checkpoint(folder / "run", folder / "out")
    return load_file(folder / "out" / "model.safetensors")[NAME]


def gathered(engine, folder):
    with hf_zero.GatheredParameters([weight(engine)]):
        return weight(engine).detach().clone()


def written_to(engine, folder):
    """Write to a weight and return it: the write is applied on top of the update."""
    with torch.no_grad():
        weight(engine).mul_(1.0)
    return weight(engine).detach().clone()


def called(engine, folder):
    with torch.no_grad():
        layer, width = engine.module.blocks[1].up, weight(engine).shape[1]
        return (layer(torch.eye(width)) - layer(torch.zeros(width, width))).T


WHOLE: dict[str, Callable[[Any, Path], torch.Tensor]] = {  # of a model whose parameters are whole
    "data": lambda engine, folder: weight(engine).data.clone(),
    "numpy": lambda engine, folder: torch.from_numpy(weight(engine).detach().numpy().copy()),
    "an operation": lambda engine, folder: (weight(engine) * 1.0).detach(),
    "foreach": lambda engine, folder: torch._foreach_mul([weight(engine)], 1.0)[0].detach(),
    "deepcopy": lambda engine, folder: copy.deepcopy(engine.module.blocks[1]).up.weight.detach(),
    "pickle": lambda engine, folder: pickle.loads(pickle.dumps(weight(engine))).detach(),
    "a write": written_to,
    "a call": called,
}
ALWAYS: dict[str, Callable[[Any, Path], torch.Tensor]] = {
    "state_dict": lambda engine, folder: engine.state_dict()[NAME].clone(),
    "state_dict of a part": lambda engine, folder: (
        engine.module.blocks[1].state_dict()["up.weight"].clone()
    ),
    "consolidated": lambda engine, folder: dict(engine.consolidated())[NAME],
    "gathered": gathered,
    "save_checkpoint": saved,
    "master": lambda engine, folder: hf_zero.safe_get_full_fp32_param(weight(engine)),
}


@in_turn("stage", [0, 3])
@on_each_rank(1)
def test_readers_see_the_step(rank, model, held_up, stage, tmp_path):
    """One after another, each right after a step."""
    engine = opened(model, offload("optimizer in files", stage, tmp_path))
    readers = {**WHOLE, **ALWAYS} if stage < 3 else ALWAYS
    train(engine, rank, range(1))
    for step, (what, read) in enumerate(readers.items(), 1):
        before = hf_zero.safe_get_full_fp32_param(weight(engine)).clone()
        train(engine, rank, range(step, step + 1))
        assert engine.updater.pending
        if stage < 3:
            assert type(weight(engine)) is UpdatingParameter and weight(engine).requires_grad
            assert weight(engine).shape == before.shape and engine.updater.pending
        (tmp_path / what).mkdir()
        got = read(engine, tmp_path / what)
        want = hf_zero.safe_get_full_fp32_param(weight(engine))
        assert float((want - before).abs().max()) > 1e-5, what
        torch.testing.assert_close(
            got, want, rtol=1e-5, atol=1e-7, msg=lambda text, what=what: f"{what}: {text}"
        )
    engine.destroy()


@on_each_rank(1)
def test_hooks_of_a_step_without_gradients_wait_for_the_step_before(rank, model, held_up, tmp_path):
    engine, pending = opened(model, offload("optimizer on cpu", 2, tmp_path)), list[Any]()
    engine.optimizer.register_step_pre_hook(lambda *given: pending.extend(engine.updater.pending))
    train(engine, rank, range(1))
    assert engine.updater.pending and not pending
    engine.run_step_hooks()
    assert not pending
    engine.destroy()


@on_each_rank(1)
def test_hooks_write_to_shards_once_their_copies_to_the_device_are_over(
    rank, model, monkeypatch, tmp_path
):
    """As if this were a device that copies beside the host."""
    calls = list[str]()
    event = SimpleNamespace(synchronize=lambda: calls.append("copied"))
    as_on_a_gpu = {"shard_stream": lambda device: "shards", "record_event": lambda stream: event}
    engine = opened(model, offload("parameters on cpu", 3, tmp_path))
    fakes = SimpleNamespace(**{**vars(streams), **as_on_a_gpu})
    monkeypatch.setattr(sharded_model, "streams", fakes)
    engine.optimizer.register_step_pre_hook(lambda *given: calls.append("before"))
    engine.optimizer.register_step_post_hook(lambda *given: calls.append("after"))
    train(engine, rank, range(1))
    assert calls == ["copied", "before", "copied", "after"]
    calls.clear()
    engine.run_step_hooks()
    assert calls == ["copied", "before", "copied", "after"]
    engine.destroy()


@pytest.fixture
def overlapped(monkeypatch):
    """Steps return before the gathers of updated parameters are done, as on a GPU."""
    monkeypatch.setattr(sharded_model, "OVERLAPS_ON_HOST", True)


@on_each_rank(2)
def test_readers_see_the_gather_of_updated_parameters(rank, model, overlapped, tmp_path):
    """Without offload: a step returns before the parameters of other ranks have come."""
    # small units share a message, whose values are copied when something waits for it
    engine = opened(model, {"stage": 2, "stage3_module_granularity_threshold": 10_000})
    readers = WHOLE | {what: ALWAYS[what] for what in ("state_dict", "consolidated", "gathered")}
    for step, (what, read) in enumerate(readers.items()):
        train(engine, rank, range(step, step + 1))
        assert type(weight(engine)) is UpdatingParameter and weight(engine).requires_grad
        whole = weight(engine)._hf_zero_flat.full
        stale = whole.clone()
        got = read(engine, tmp_path)
        assert type(weight(engine)) is OwnedParameter, what
        want = hf_zero.safe_get_full_fp32_param(weight(engine))
        assert float((whole - stale).abs().max()) > 1e-5, what
        torch.testing.assert_close(
            got, want, rtol=1e-5, atol=1e-7, msg=lambda text, what=what: f"{what}: {text}"
        )
    train(engine, rank, range(20, 21))
    parameter = weight(engine)
    engine.destroy()
    total = parameter.detach().clone()
    dist.all_reduce(total)
    assert type(parameter) is torch.nn.Parameter and torch.equal(total, 2 * parameter)


LOST = r"all-gather of updated blocks\.1.*connection closed"


class Lost:
    """A message that another rank has not sent before it ended."""

    def wait(self):
        raise RuntimeError("connection closed")


@on_each_rank(2)
def test_a_lost_gather_is_an_error_of_every_read_and_of_destroy(rank, model, overlapped, tmp_path):
    engine = opened(model, {"stage": 2})
    train(engine, rank, range(1))
    finish = owner_of(weight(engine)).optimizer_shard._finish_update
    getclosurevars(finish).nonlocals["handle"]._works = [Lost()]
    for read in (weight, weight, lambda engine: engine(features(0, 0, rank))):
        with pytest.raises(RankMismatchError, match=LOST):
            read(engine) + 0
    with pytest.raises(RankMismatchError, match=LOST):
        engine.destroy()
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}


@in_turn("kind", [float, torch.tensor])
def test_what_a_scheduler_sets_right_after_the_step_belongs_to_the_next(held_up, kind, tmp_path):
    """Also where the rate is a tensor, which schedulers write in place."""

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=kind(1e-2), eps=1e-6)

    def told(step, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.1
            if step == 2:
                group["weight_decay"], group["betas"] = 10.0, (0.0, 0.0)

    way = "optimizer on cpu"
    want, got = (trained(offload(each, 2, tmp_path), make, told, steps=3) for each in (DEVICE, way))
    same(got, want)


STATE: dict[str, Callable[[Any], Any]] = {
    "iteration": lambda state: [state[key] for key in state],
    "items": lambda state: [entry for _, entry in state.items()],
    "values": lambda state: list(state.values()),
    "get": lambda state: [state.get(key) for key in state.parts],
    "key": lambda state: [state[key] for key in state.parts],
    "len": lambda state: [] if len(state) else None,
    "keys": lambda state: [] if state.keys() else None,
    "popitem": lambda state: [state.popitem()][:0],
    "pop": lambda state: [state.pop(0, None)][:0],
    "in": lambda state: [0 in state][:0],
}


@in_turn("how", STATE)
@on_each_rank(1)
def test_the_state_of_the_optimizer_is_read_and_written_behind_the_update(
    rank, model, held_up, how
):
    engine = opened(model, offload("optimizer on cpu", 3, Path()))
    train(engine, rank, range(2))
    assert engine.updater.pending
    entries = STATE[how](engine.optimizer.state)
    assert not engine.updater.pending
    for entry in entries:
        entry["exp_avg"].zero_()
    if entries:
        assert not hf_zero.safe_get_full_optimizer_state(weight(engine), "exp_avg").any()
    engine.destroy()


@in_turn("way", [DEVICE, *PLACES])
def test_state_that_is_cleared_begins_anew(way, tmp_path):
    def told(step, optimizer):
        if step == 1:
            optimizer.state.clear()

    want, _ = by_hand(adamw, [[(1.0, 0)]] * 4, 1, after_step=lambda step, _, it: told(step, it))
    same(trained(offload(way, 3, tmp_path), told=told), want)


def with_frozen(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def fail(*given):
    raise ZeroDivisionError


@in_turn("unfreezes", [False, True])
def test_a_load_of_weights_alone_leaves_a_half_updated_optimizer(unfreezes, tmp_path):
    def run(rank, model):
        model.head.requires_grad_(False)
        section = offload("optimizer on cpu", 2, tmp_path, update_in_backward=True)
        section["stage3_module_granularity_threshold"] = 0  # several units
        engine = opened(model, section, make=with_frozen)
        train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path))
        handle = engine.module.blocks[0].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            engine.backward(squared(engine, At(2, 0, rank)))
        handle.remove()
        model.head.requires_grad_(unfreezes)
        engine.load_checkpoint(str(tmp_path), load_module_only=True)
        with pytest.raises(PartitionError, match="half changed: a backward had updated a part"):
            engine.step()
        engine.load_checkpoint(str(tmp_path))
        train(engine, rank, range(2, 3))
        engine.destroy()

    on_ranks(1, run, build=lambda: seeded(lambda: Stack(4, 32)))


@in_turn("unfreezes", [False, True])
def test_a_load_of_weights_alone_after_an_update_in_the_backward(unfreezes, tmp_path):
    """The optimizer keeps the state of the step that the backward has made; its gradients go."""

    def run(rank, model):
        model.head.requires_grad_(False)
        section = offload("optimizer on cpu", 2, tmp_path, update_in_backward=True)
        engine = opened(model, section, make=with_frozen)
        train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path))
        before = engine.state_dict()["enter.weight"].clone()
        engine.backward(squared(engine, At(2, 0, rank)))
        assert not torch.equal(engine.state_dict()["enter.weight"], before)
        model.head.requires_grad_(unfreezes)
        engine.load_checkpoint(str(tmp_path), load_module_only=True)
        assert torch.equal(engine.state_dict()["enter.weight"], before)
        with pytest.raises(PartitionError, match="no gradient"):
            engine.step()
        assert engine.global_steps == 3
        train(engine, rank, range(2, 3))
        assert engine.global_steps == 4
        engine.destroy()

    on_ranks(2, run)
