"""Muon over shards: the weights of torch.optim's Muon and AdamW in one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.optim import Muon
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.offloads import WAYS, offload, stages_of
from tests.helpers.stacks import by_hand, on_ranks, squared
from tests.helpers.training import At, Plan, trainable

STEPS = 4
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0}
CELLS = [(stage, ranks) for stage in STAGES for ranks in (1, 2, 3, 4)]


def parted(model: Any) -> tuple[list[Any], list[Any]]:
    matrices = [p for p in trainable(model) if p.ndim == 2]
    return matrices, [p for p in trainable(model) if p.ndim != 2]


class Both(torch.optim.Optimizer):
    """torch.optim's two, stepped together: the oracle."""

    def __init__(self, model: Any, **settings: Any) -> None:
        matrices, others = parted(model)
        self.each = [
            torch.optim.Muon(matrices, **{**SETTINGS, **settings}),
            torch.optim.AdamW(others, **ADAM),
        ]

    def step(self) -> None:  # type: ignore[override]
        for each in self.each:
            each.step()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for each in self.each:
            each.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.each for group in each.param_groups]


def ours(model: Any, **settings: Any) -> Muon:
    matrices, others = parted(model)
    groups = [{"params": matrices}, {"params": others, "use_muon": False, **ADAM}]
    return Muon(groups, **{**SETTINGS, **settings})


def train(engine: Any, rank: int, micros: int = 1) -> Any:
    for step in range(STEPS):
        for micro in range(micros):
            engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()
    return full_weights(engine)


def compare(weights: Any, want: Any, close: bool = True) -> None:
    """``close`` element by element, else in norm: Newton and Schulz's bf16 makes an update of one
    that is some 1 % off of gradients that were added up in another order.
    """
    for name, tensor in want.items():
        if close:
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=5e-4)
        off = float((weights[name] - tensor).norm()) / STEPS**0.5
        assert off < 0.03 * SETTINGS["lr"] * tensor.numel() ** 0.5, (name, off)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("stage", "ranks"), fast(CELLS, lambda stage, ranks: ranks == 2 or (stage, ranks) == (3, 3))
)
@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
def test_the_weights_are_torchs(stage: int, ranks: int, settings: dict[str, Any]) -> None:
    want, _ = by_hand(lambda model: Both(model, **settings), [[(1.0, 0)]] * STEPS, ranks)

    def run(rank: int, model: Any) -> Any:
        engine = start(model, ours(model, **settings), config_of(stage, Plan(ranks=ranks)))
        return train(engine, rank)

    for weights in on_ranks(ranks, run):
        compare(weights, want, close=ranks < 3)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_and_clipped(stage: int) -> None:
    windows = [[(0.5, 0), (0.5, 1)]] * STEPS
    want, _ = by_hand(Both, windows, 2, 0.1)
    config = config_of(stage, Plan(ranks=2, accumulation=2), gradient_clipping=0.1)
    for weights in on_ranks(
        2, lambda rank, model: train(start(model, ours(model), config), rank, 2)
    ):
        compare(weights, want, close=False)


@pytest.mark.parametrize("stage", [1, 3])
def test_by_name(stage: int) -> None:
    """From the configuration: linear layers by Muon, the rest by AdamW."""
    params = {"momentum": 0.9, "weight_decay": 0.1, "muon_lr": 0.02, "adam_lr": 0.01}

    def adam_decays(model: Any) -> Any:
        both: Any = Both(model)
        both.each[1].param_groups[0]["weight_decay"] = 0.1
        return both

    want, _ = by_hand(adam_decays, [[(1.0, 0)]] * STEPS, 2)

    def run(rank: int, model: Any) -> Any:
        section = {"type": "Muon", "params": params}
        return train(start(model, None, config_of(stage, optimizer=section)), rank)

    for weights in on_ranks(2, run):
        compare(weights, want)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_leaves_all_state_as_it_was(stage: int) -> None:
    def run(rank: int, model: Any) -> Any:
        section = {"enabled": True, "initial_scale_power": 4}
        optimizer = ours(model)
        engine = start(model.half(), optimizer, config_of(stage, fp16=section))
        engine.backward(squared(engine, At(0, 0, rank), torch.float16))
        engine.step()
        before = [{**state} for state in optimizer.state.values()]
        before = [{k: v.clone() for k, v in state.items()} for state in before]
        weights = full_weights(engine)
        loss = squared(engine, At(1, 0, rank), torch.float16)
        engine.backward(loss * (float("inf") if rank else 1.0))
        engine.step()
        assert engine.skipped_steps == 1
        for old, new in zip(before, optimizer.state.values()):
            assert all(torch.equal(old[name], new[name]) for name in old)
        return weights, full_weights(engine)

    for before, after in on_ranks(2, run):
        oracle.compare_tensors("weights", after, before)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_goes_on_on_other_ranks(stage: int, tmp_path: Path) -> None:
    want, _ = by_hand(Both, [[(1.0, 0)]] * STEPS, 2)

    def first(rank: int, model: Any) -> None:
        engine = start(model, ours(model), config_of(stage))
        for step in range(2):
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
        engine.save_checkpoint(str(tmp_path))

    def then(rank: int, model: Any) -> Any:
        engine = start(model, ours(model), config_of(4 - stage))
        engine.load_checkpoint(str(tmp_path))
        for step in range(2, STEPS):
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
        return full_weights(engine)

    on_ranks(2, first)
    for weights in on_ranks(2, then):
        compare(weights, want)


PLACES = [(way, stage) for way in WAYS for stage in stages_of(way) if "parameters" not in way]


@pytest.mark.parametrize(("way", "stage"), fast(PLACES, lambda way, stage: stage == 3))
def test_offloaded(way: str, stage: int, tmp_path: Path) -> None:
    """Momentum and update on the host, matrices on the device: directions travel."""
    want, _ = by_hand(Both, [[(1.0, 0)]] * STEPS, 2)
    section = offload(way, stage, tmp_path, buffer_size=512)
    config = config_of(stage, Plan(ranks=2), zero_optimization=section)
    for weights in on_ranks(2, lambda rank, model: train(start(model, ours(model), config), rank)):
        compare(weights, want)


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}])
def test_each_parameter_keeps_its_own_moments_alone(zero: Any) -> None:
    """Four bytes of a matrix, eight of what AdamW updates; masters beside them where offloaded."""

    def run(rank: int, model: Any) -> Any:
        section: dict[str, Any] = {"stage": 2, **zero}
        engine = start(model, ours(model), config_of(2, zero_optimization=section))
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        engine.updater.finish()
        matrices = sum(flat.layout.chunk for flat in engine.flats if "momentum" in flat.key)
        others = sum(flat.layout.chunk for flat in engine.flats) - matrices
        assert 0 < others < matrices
        masters = 4 * (matrices + others) if zero else 0
        assert engine.state_bytes()["optimizer"] == masters + 4 * matrices + 8 * others

    on_ranks(2, run)


@pytest.mark.parametrize("scheduled", [False, True])
def test_torchs_own_object_is_taken(scheduled: bool) -> None:
    """It stays of its class, and is of no other one again at the end."""

    def make(model: Any) -> Any:
        matrices, others = parted(model)
        for parameter in others:
            parameter.requires_grad_(False)
        return torch.optim.Muon(matrices, **SETTINGS)

    def decays(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def plain(model: Any) -> Any:
        optimizer = make(model)
        schedules.append(decays(optimizer))
        return optimizer

    schedules: list[Any] = []
    after = (lambda *_: schedules[0].step()) if scheduled else (lambda *_: None)
    want, _ = by_hand(plain, [[(1.0, 0)]] * STEPS, 2, after_step=after)

    def run(rank: int, model: Any) -> Any:
        optimizer = make(model)
        schedule = decays(optimizer)
        engine = start(model, optimizer, config_of(3))
        assert isinstance(optimizer, Muon) and isinstance(optimizer, torch.optim.Muon)
        for step in range(STEPS):
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
            if scheduled:
                schedule.step()
        weights = full_weights(engine)
        engine.destroy()
        assert type(optimizer) is torch.optim.Muon
        return weights

    for weights in on_ranks(2, run):
        compare(weights, want)
