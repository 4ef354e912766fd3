"""What an engine keeps, and what it ends, when it is built again because other parameters train."""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint import save_job
from hf_zero.errors import CheckpointError, ConfigError, OffloadError
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import run_steps, stack
from tests.ranks.test_offload_faults import inject
from tests.ranks.test_trainable_set import RANKS, all_of, refuse
from tests.ranks.test_whole_state import ROWS, Scaled, batch, settings, train


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
        patched.setattr(save_job, "write_image", full)
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
