"""Optimizers on ranks: sums over whole tensors and their checkpoints; objects of the user, with
live groups and state. Each one against the plain loop, in every place, resumed anywhere and by
name, is a row of ``test_capabilities.py``.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import HfZeroError, UnsupportedOptimizerError
from hf_zero.optim import Adafactor, Muon
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.optimizers import (
    MUON,
    WHOLE,
    Row,
    parted,
    same_directions,
)
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, adamw, trainable

RANKS = 2
STEPS = 4
WINDOWS = [[(1.0, 0)]] * STEPS


def plainly(row, **more):
    return by_hand(row.by_hand, WINDOWS, RANKS, **more)[0]


def trained(row, config, after=lambda step, optimizer: None):
    """Weights of each rank, and its optimizer, whose engine is destroyed."""

    def run(rank, model):
        optimizer = row.ours(model)
        engine = start(model, optimizer, config)
        run_steps(engine, rank, range(STEPS), after=lambda step: after(step, optimizer))
        found, numbers = full_weights(engine), row.read(optimizer)
        engine.destroy()
        return found, optimizer, numbers

    return on_ranks(RANKS, run)


@in_turn("stage", [1, 3])
def test_the_coefficients_of_lamb_are_those_of_a_plain_run(stage):
    row, kept = WHOLE["lamb"], []
    by_hand(lambda model: kept.append(row.ours(model)) or kept[0], WINDOWS, RANKS)
    for _, _, found in trained(row, config_of(stage)):
        assert found == pytest.approx(row.read(kept[0]), rel=1e-4) and len(found) > 3


def test_a_state_dict_of_shards_goes_on(tmp_path):
    """Loaded into an optimizer whose segments are cut elsewhere."""
    row = WHOLE["adafactor"]

    def run(rank, model):
        optimizer = row.ours(model)
        engine = start(model, optimizer, config_of(1))
        run_steps(engine, rank, range(2))
        engine.save_checkpoint(tmp_path, tag="weights")
        packed = optimizer.state_dict()
        engine.destroy(gather=True)
        section = offload("optimizer on cpu", 1, tmp_path, buffer_size=500)
        optimizer = row.ours(model)
        engine = start(model, optimizer, config_of(1, zero_optimization=section))
        engine.load_checkpoint(tmp_path, tag="weights", load_optimizer_states=False)
        optimizer.load_state_dict(packed)
        run_steps(engine, rank, range(2, STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, plainly(row))


@in_turn("kind", [transformers.Adafactor, torch.optim.Adafactor])
def test_an_object_of_another_library(kind):
    row = Row(lambda model: kind([{"params": each} for each in parted(model)]))
    want = plainly(row)
    for weights, optimizer, _ in trained(row, config_of(2)):
        oracle.compare_tensors("weights", weights, want)
        assert type(optimizer) is kind


def test_torchs_own_muon_is_taken():
    """It is of its class again at the end; a schedule is followed."""

    def make(model):
        matrices, others = parted(model)
        for parameter in others:
            parameter.requires_grad_(False)
        return torch.optim.Muon(matrices, **MUON)

    def decay(step, optimizer):
        optimizer.param_groups[0]["lr"] = MUON["lr"] * 0.5 ** (step + 1)

    def seen(step, optimizer):
        assert isinstance(optimizer, Muon) and isinstance(optimizer, torch.optim.Muon)
        decay(step, optimizer)

    row = Row(make)
    want = plainly(row, after_step=lambda step, model, optimizer: decay(step, optimizer))
    for weights, optimizer, _ in trained(row, config_of(3), seen):
        same_directions(weights, want)
        assert type(optimizer) is torch.optim.Muon


@in_turn("name, stage", [("adafactor", 1), ("lamb", 3)])
@on_each_rank(RANKS)
def test_sums_of_whole_tensors_are_few_messages_and_nothing_is_gathered(rank, model, name, stage):
    """Adafactor: rows, columns and a number for each matrix, then one number. LAMB: two numbers
    of 64 bits for each tensor, and a row for ranks that own nothing of a group.
    """
    engine = start(model, WHOLE[name].ours(model), config_of(stage))
    shapes = [tuple(p.ds_shape if stage == 3 else p.shape) for p in model.parameters()]
    run_steps(engine, rank, range(1))
    stats = engine.mesh.stats
    stats.keep_log = True
    stats.log.clear()
    run_steps(engine, rank, range(1, 2))
    sent = [nbytes for _, key, nbytes in stats.log if "sums over whole tensors" in key]
    numbers = sum(sum(shape) for shape in shapes) + len(shapes)
    assert (
        sent
        == {"adafactor": [8 * numbers, 8 * len(shapes)], "lamb": [(len(shapes) + 1) * 2 * 8]}[name]
    )


@on_each_rank(RANKS)
def test_a_checkpoint_of_torchs_adafactor_is_refused(rank, model, tmp_path):
    engine = start(model, torch.optim.Adafactor(trainable(model)), config_of(1))
    run_steps(engine, rank, range(1))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = start(model, Adafactor(trainable(model)), config_of(1))
    with pytest.raises(HfZeroError, match=r"has col_var, row_var, variance of whole parameters"):
        engine.load_checkpoint(tmp_path)


def test_factors_that_a_manifest_promises_are_looked_for(tmp_path):
    def run(rank, model):
        engine = start(model, WHOLE["adafactor"].ours(model), config_of(2))
        run_steps(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="saved")

    on_ranks(RANKS, run)
    path = tmp_path / "saved" / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    factors = content["optimizer"]["factors"]
    name = next(iter(factors))
    for change, message in (
        ({"file": 9}, rf"whole parameter '{name}' is promised in file 9; there are 2 files"),
        ({"shapes": {"exp_avg_sq_row": [1000]}}, rf"factor::{name}::exp_avg_sq_row.*expected 1000"),
        ({"shapes": {"other": [4]}}, rf"factor::{name}::other' is absent"),
    ):
        told = {**factors, name: {**factors[name], **change}}
        path.write_text(
            json.dumps({**content, "optimizer": {**content["optimizer"], "factors": told}})
        )
        problems = hf_zero.verify_checkpoint(path.parent).problems
        assert any(re.search(message, each) for each in problems)


# ---- objects of the user ----


def test_model_parameters_as_groups():
    """Groups handed to initialize beside an optimizer from the config."""

    def groups(model):
        return [
            {"params": list(model.head.parameters()), "lr": 0.1},
            {"params": [p for b in (model.enter, model.blocks) for p in b.parameters()]},
        ]

    want, _ = by_hand(lambda model: torch.optim.SGD(groups(model), lr=0.01), WINDOWS, RANKS)

    def run(rank, model):
        config = config_of(3, optimizer={"type": "SGD", "params": {"lr": 0.01}})
        engine = start(model, None, config, model_parameters=groups(model))
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.01]
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


def live_groups(rank, model, stage):
    """The object stays, and its groups are read in each step."""
    mine = adamw(model)
    groups = list(mine.param_groups)
    engine, optimizer, loader, scheduler = hf_zero.initialize(
        model=model, optimizer=mine, config=config_of(stage)
    )
    assert optimizer is mine and engine.optimizer is mine
    assert len(mine.param_groups) == len(groups)
    assert all(now is before for now, before in zip(mine.param_groups, groups))
    assert loader is None and scheduler is None
    run_steps(engine, rank, range(STEPS), after=lambda step: halve(step, None, mine))
    assert engine.get_lr() == [pytest.approx(1e-3 / 16)]
    return full_weights(engine)


def plain_loop(rank, model, stage):
    """``loss.backward()``, ``optimizer.step()`` and ``optimizer.zero_grad()`` are the engine's."""
    optimizer = adamw(model)
    engine = start(model, optimizer, config_of(stage))
    for step in range(STEPS):
        squared(engine, At(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(engine)


def with_state(rank, model, stage):
    """The optimizer has made two plain steps with the data of both ranks."""
    optimizer = adamw(model)
    for step in range(2):
        for other in range(RANKS):
            (squared(model, At(step, 0, other)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = start(model, optimizer, config_of(stage))
    run_steps(engine, rank, range(2, STEPS))
    return full_weights(engine)


def halve(step, model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@in_turn(
    "run, stage",
    [
        (live_groups, 0),
        (live_groups, 3),
        (plain_loop, 1),
        (plain_loop, 3),
        (with_state, 2),
        (with_state, 3),
    ],
)
def test_the_users_object(run, stage):
    after = {"after_step": halve} if run is live_groups else {}
    want, _ = by_hand(adamw, WINDOWS, RANKS, **after)
    for weights in on_ranks(RANKS, run, stage):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


class Mine(torch.optim.SGD):
    """An element-wise class of the user's own, with a step that is not torch's."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_class_that_is_not_known_is_refused_by_name_and_accepted_when_vouched_for():
    want, _ = by_hand(lambda model: torch.optim.SGD(trainable(model), lr=0.05), WINDOWS, RANKS)

    def run(rank, model):
        with pytest.raises(UnsupportedOptimizerError, match="Mine") as caught:
            start(model, Mine(trainable(model), lr=0.05), config_of(3))
        assert "elementwise_optimizers" in str(caught.value)
        with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
            start(model, torch.optim.LBFGS(trainable(model)), config_of(3))
        vouched = config_of(3, elementwise_optimizers=["Mine"])
        engine = start(model, Mine(trainable(model), lr=0.05), vouched)
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


def test_no_optimizer_at_all_evaluates():
    def run(rank, model):
        engine = start(model, None, config_of(3))
        assert engine.optimizer is None
        engine.eval()
        with torch.no_grad():
            return float(squared(engine, At(0, 0, 0)))

    want = float(squared(stack(), At(0, 0, 0)))
    assert on_ranks(RANKS, run) == pytest.approx([want] * RANKS, rel=1e-6)


@in_turn("stage", [1, 3])
def test_an_optimizer_object_goes_on_under_another_engine(stage):
    """What it has learnt is gone."""

    def run(rank, model):
        built = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            engine = start(model, built, config_of(stage))
            run_steps(engine, rank, [0])
            engine.destroy(gather=True)
        after = dict(model.named_parameters())
        return max(float((after[name] - weights[name]).abs().max()) for name in weights)

    for moved in on_ranks(RANKS, run):
        assert moved == pytest.approx(1e-2, rel=0.05)  # Adam's first step
