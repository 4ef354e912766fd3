"""Resumes on other ranks and at other stages, before and after parameters were unfrozen, beside one
run of plain PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import CheckpointError, PartitionError
from tests.helpers.cells import in_turn
from tests.helpers.ranks import run_ranks
from tests.ranks.test_trainable_set import WAYS, plainly
from tests.ranks.test_whole_state import OPTIMIZERS, Scaled, batch, settings

ROWS = 8  # of a step, on all ranks
LEGS = ((2, range(2)), (4, range(2, 5)), (1, range(5, 6)))  # ranks and steps; unfrozen in step 3


def leg(rank: int, name: str, way: str, stage: int, number: int, folder: Path) -> Any:
    """Resume, if there is a save, and take the steps of a leg; return the weights."""
    ranks, steps = LEGS[number]
    begin, change = WAYS[way]
    model, rows = Scaled(), ROWS // ranks
    params: Any = begin(model, None, 0)  # type: ignore[arg-type]
    if number == 2:  # the run had changed by its save
        model[0].requires_grad_(True)
    optimizer = OPTIMIZERS[name](params)
    if number == 2 and way == "add_param_group":
        change(model, optimizer, 3)
    config = settings(stage, offload=number == 1) | {"train_micro_batch_size_per_gpu": rows}
    engine = hf_zero.initialize(
        model=model, optimizer=optimizer, config=config, resume=str(folder) if number else None
    )[0]
    assert engine.global_steps == steps.start
    for step in steps:
        if number < 2:
            change(model, engine.optimizer, step)
        engine.backward(engine(batch(step)[rank * rows : (rank + 1) * rows]).square().mean())
        engine.step()
    engine.save_checkpoint(str(folder))
    weights = [*engine.state_dict().values()]
    engine.destroy()
    return weights


@in_turn("name, way, stages", [
    ("AdamW", "unfrozen", (3, 1, 2)), ("SGD with dampening", "add_param_group", (0, 3, 3)),
    ("Rprop", "unfrozen", (2, 2, 0)), ("NAdam", "add_param_group", (1, 3, 1)),
])  # fmt: skip
def test_a_run_that_changes_goes_on_anywhere(
    tmp_path: Path, name: str, way: str, stages: tuple[int, ...]
) -> None:
    folder = tmp_path / name / way
    for number, stage in enumerate(stages):
        ended = run_ranks(LEGS[number][0], leg, name, way, stage, number, folder)
    want = plainly(OPTIMIZERS[name], *WAYS[way])
    for got in ended:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_state_of_what_is_frozen_again_is_saved(tmp_path: Path) -> None:
    """A frozen parameter that has trained keeps its state through a change, and through a save."""

    def run(rank: int) -> None:
        model = Scaled()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=settings(3))[0]

        def step(number: int) -> None:
            engine.backward(engine(batch(number)[rank * 4 : rank * 4 + 4]).square().mean())
            engine.step()

        step(0)
        model[4].requires_grad_(False)
        model[0].requires_grad_(True)
        step(1)
        engine.save_checkpoint(str(tmp_path))
        names = ("exp_avg", "exp_avg_sq")
        weight = model[4].weight
        before = [hf_zero.safe_get_full_optimizer_state(weight, name).clone() for name in names]
        assert all(bool(each.any()) for each in before)
        model[4].requires_grad_(True)
        step(2)
        engine.load_checkpoint(str(tmp_path))
        for name, value in zip(names, before):
            assert torch.equal(hf_zero.safe_get_full_optimizer_state(weight, name), value)
        engine.destroy()

    run_ranks(2, run)


def test_a_load_after_a_step_that_broke_off_may_unfreeze(tmp_path: Path) -> None:
    """It replaces the half changed state, of parameters that train from now on, too; one that finds
    no checkpoint leaves the engine refused.
    """

    def run(rank: int) -> None:
        def begun(model: Any) -> Any:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            return hf_zero.initialize(model=model, optimizer=optimizer, config=settings(2))[0]

        def step(engine: Any, number: int) -> None:
            engine.backward(engine(batch(number)[rank * 4 : rank * 4 + 4]).square().mean())
            engine.step()

        def fail(*_: Any) -> None:
            raise RuntimeError("a hook of the script")

        model = Scaled()
        engine = begun(model)
        step(engine, 0)
        engine.save_checkpoint(str(tmp_path))
        step(engine, 1)
        want = [value.clone() for value in engine.state_dict().values()]
        engine.destroy()
        model[4].requires_grad_(False)
        engine = begun(model)
        hook = engine.optimizer.register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="a hook of the script"):
            step(engine, 0)
        hook.remove()
        model[4].requires_grad_(True)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(str(tmp_path / "missing"))
        with pytest.raises(PartitionError, match="half changed"):
            step(engine, 0)
        engine.load_checkpoint(str(tmp_path))
        step(engine, 1)
        for got, value in zip(engine.state_dict().values(), want, strict=True):
            assert torch.equal(got, value)
        engine.destroy()

    run_ranks(2, run)
