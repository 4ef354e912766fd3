"""Updates that begin in the backward: what may not come between it and its step is refused,
because nothing takes it back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw


class Broken(Exception):
    """What breaks a backward."""


def opened(model: torch.nn.Module, folder: Path, **more: Any) -> Any:
    section = offload("optimizer on cpu", 2, folder, update_in_backward=True)
    return start(model, adamw(model), config_of(2, zero_optimization=section, **more))


def backward(engine: Any, step: int, rank: int = 0) -> None:
    engine.backward(squared(engine, At(step, 0, rank)))


def train(engine: Any, steps: range, rank: int = 0) -> None:
    for step in steps:
        backward(engine, step, rank)
        engine.step()


def broken_backward(engine: Any) -> None:
    def refuse(*args: Any) -> None:
        raise Broken

    handle = engine.module.blocks[0].register_full_backward_hook(refuse)
    with suppress(Broken):
        backward(engine, 2)
    handle.remove()
    engine.step()


def clipped(engine: Any) -> None:
    engine.max_norm = 0.1
    engine.step()


CLIPPING, INCOMPLETE = (
    "gradient clipping that was switched on after the backward",
    "a step whose gradients are not complete",
)
AFTER: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    "another backward": ("another backward", lambda engine, folder: backward(engine, 3)),
    "engine.zero_grad": ("zero_grad()", lambda engine, folder: engine.zero_grad()),
    "optimizer.zero_grad": ("zero_grad()", lambda engine, folder: engine.optimizer.zero_grad()),
    "clipping": (CLIPPING, lambda engine, folder: clipped(engine)),
    "save_checkpoint": (
        "save_checkpoint()",
        lambda engine, folder: engine.save_checkpoint(str(folder)),
    ),
}


@pytest.mark.parametrize("what", AFTER)
def test_what_would_use_a_half_updated_model_is_refused(what: str, tmp_path: Path) -> None:
    words, call = AFTER[what]

    def run(rank: int, model: torch.nn.Module) -> None:
        engine = opened(model, tmp_path)
        train(engine, range(2))
        backward(engine, 2)
        assert engine.updater.early is not None
        with pytest.raises(
            PartitionError,
            match=re.escape(f"{words} comes after a backward that has updated a part of the model"),
        ):
            call(engine, tmp_path)
        engine.destroy()

    on_ranks(1, run)


def test_a_backward_that_breaks_after_updates_have_begun(tmp_path: Path) -> None:
    def run(rank: int, model: torch.nn.Module) -> None:
        engine = opened(model, tmp_path)
        train(engine, range(2))
        with pytest.raises(PartitionError, match=f"{INCOMPLETE} .* load a checkpoint"):
            broken_backward(engine)
        engine.destroy()

    on_ranks(1, run)


def test_a_checkpoint_mends_what_a_broken_backward_left_half_updated(tmp_path: Path) -> None:
    def run(rank: int, model: torch.nn.Module, breaks: bool) -> dict[str, torch.Tensor]:
        engine = opened(model, tmp_path)
        train(engine, range(2), rank)
        engine.save_checkpoint(str(tmp_path / str(breaks)))
        if breaks:
            with suppress(PartitionError):
                broken_backward(engine)
            engine.load_checkpoint(str(tmp_path / str(breaks)))
        train(engine, range(2, 4), rank)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want, got = on_ranks(1, run, False)[0], on_ranks(1, run, True)[0]
    for name, weights in want.items():
        assert torch.equal(weights, got[name]), name


def test_windows_whose_end_is_said_from_outside(tmp_path: Path) -> None:
    """Backwards before the last one begin nothing."""

    def run(rank: int, model: torch.nn.Module, section: dict[str, Any]) -> dict[str, torch.Tensor]:
        engine = start(model, adamw(model), config_of(2, zero_optimization=section))
        for step in range(4):
            for micro in range(3):
                engine.set_gradient_accumulation_boundary(micro == 2)
                engine.backward(squared(engine, At(step, micro, rank)) / 3)
            engine.step()
        weights = {
            name: hf_zero.safe_get_full_fp32_param(p).clone()
            for name, p in engine.module.named_parameters()
        }
        engine.destroy()
        return weights

    want = on_ranks(2, run, offload("optimizer on cpu", 2, tmp_path))[0]
    got = on_ranks(2, run, offload("optimizer on cpu", 2, tmp_path, update_in_backward=True))[0]
    for name, weights in want.items():
        assert torch.equal(weights, got[name]), name
