"""What runs at the end of a backward that makes its update: hooks of the optimizer, which may use
the model as after ``step()``, and what ``step()`` has left to do.
"""

from __future__ import annotations

import threading
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.offload.update import OffloadedUpdater
from hf_zero.zero.step import optimizer_step
from tests.helpers.cells import by_stage, in_turn
from tests.helpers.offloads import same
from tests.helpers.stacks import on_ranks, squared, stack
from tests.helpers.training import At, adamw
from tests.ranks.test_updates_before_step import (
    OFFLOADS,
    RANKS,
    STEPS,
    backward,
    opened,
    plain_run,
    state_of,
)

HELD_SECONDS = 5.0  # of an update that the test has not let go on


def evaluated(net: Any) -> float:
    training = net.training
    net.eval()
    with torch.no_grad():
        loss = squared(net, At(9, 0, 0)).item()
    net.train(training)
    return loss


@in_turn("stage, offload", *by_stage((1, 3), OFFLOADS))
def test_a_hook_after_the_update_can_evaluate_the_model(stage, offload):
    """Its forward is none inside a backward, although torch's graph task is still under way."""
    want: list[float] = []
    plain = plain_run(2, after=lambda step, model, optimizer: want.append(evaluated(model)))

    def run(rank: int, model: nn.Module) -> list[float]:
        engine, seen = opened(model, stage, accumulation=2, zero=offload), list[float]()
        engine.optimizer.register_step_post_hook(lambda *given: seen.append(evaluated(engine)))
        for step in range(STEPS):
            for micro in range(2):
                backward(engine, rank, step, micro)
                engine.step()
            assert len(seen) == engine.global_steps == step + 1
            assert engine.micro_steps == 2 * (step + 1)
        same(state_of(engine), plain[-1])
        engine.destroy()
        return seen

    for seen in on_ranks(RANKS, run):
        assert seen == pytest.approx(want, rel=1e-4)


@in_turn("stage, accumulation", [*product((2, 3), (1, 2))])
def test_a_hook_after_the_update_can_drop_its_gradients(stage, accumulation):
    plain = plain_run(accumulation)

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, accumulation=accumulation)
        engine.optimizer.register_step_post_hook(lambda optimizer, *given: optimizer.zero_grad())
        for step in range(STEPS):
            for micro in range(accumulation):
                backward(engine, rank, step, micro)
                closes = micro + 1 == accumulation
                assert engine.is_gradient_accumulation_boundary() is closes
                engine.step()
            assert engine.global_steps == step + 1
        assert engine.accumulation.restarts == 0
        same(state_of(engine), plain[-1])
        engine.destroy()

    on_ranks(RANKS, run)


@in_turn("stage, offload", [*product((1, 2), OFFLOADS)])
def test_one_rank_has_a_backward_that_no_hook_sees(stage, offload):
    """Its collectives are those of the other ranks, whose hooks have seen theirs."""

    def loss_of(net: Any, rank: int, step: int) -> torch.Tensor:
        if rank == 1 and step == 1:  # as for a batch without samples
            loss: torch.Tensor = sum(p.square().sum() for p in net.parameters())
            return loss
        return squared(net, At(step, 0, rank))

    def run(rank: int, model: nn.Module) -> Any:
        engine = opened(model, stage, zero=offload)
        for step in range(STEPS):
            loss_of(engine.module, rank, step).backward()
            engine.step()
            assert engine.global_steps == step + 1
        values = state_of(engine)
        engine.destroy()
        return values

    model = stack()
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(model, rank, step) / RANKS).backward()
        optimizer.step()
    want = {name: p.detach() for name, p in model.named_parameters()}
    for values in on_ranks(RANKS, run):
        same({name: values[f"{name} master"] for name in want}, want)


def test_step_waits_for_no_update_into_files(monkeypatch, tmp_path):
    """The next backward that updates looks at the writes."""
    gate, held, run_update = threading.Event(), list[bool](), OffloadedUpdater._run

    def wait(self: Any, *given: Any) -> Any:
        held.append(gate.wait(HELD_SECONDS))
        return run_update(self, *given)

    def run(rank: int, model: nn.Module) -> None:
        files = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
        engine = opened(model, 3, zero=files)
        for step in range(STEPS):
            gate.clear()
            backward(engine, rank, step)
            engine.step()
            assert engine.updater.pending
            gate.set()
            engine.updater.finish()
        same(state_of(engine), plain[-1])
        engine.destroy()

    plain = plain_run(ranks=1)
    monkeypatch.setattr(OffloadedUpdater, "_run", wait)
    on_ranks(1, run)
    assert held and all(held)


def test_the_end_of_an_update_follows_those_of_branches_on_other_streams(monkeypatch):
    """As if a branch of the model had a stream of its own, on a GPU."""
    waits = list[tuple[list[Any], Any]]()
    fakes = SimpleNamespace(
        current_stream=lambda device: "stream of the script",
        wait_for=lambda others, waiting: waits.append((others, waiting)),
    )

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2)
        monkeypatch.setattr(optimizer_step, "streams", fakes)
        backward(engine, rank, 0)
        assert not waits
        engine.step()
        engine.optimizer_step._updated_on = "stream of a branch"  # by the backward that follows
        backward(engine, rank, 1)
        assert waits == [(["stream of a branch"], "stream of the script")]
        engine.step()
        engine.destroy()

    on_ranks(1, run)


def test_state_that_does_not_come_back_to_the_device_breaks_the_step():
    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2, zero={"offload_optimizer": {"device": "cpu", "ratio": "auto"}})
        engine.optimizer_step.bring_state_back = fail
        backward(engine, rank, 0)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
        with pytest.raises(PartitionError, match="step 1 was broken off by OutOfMemoryError"):
            engine.state_dict()
        engine.destroy()

    on_ranks(RANKS, run)
