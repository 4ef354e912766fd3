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

from hf_zero.errors import PartitionError
from tests.helpers import offloads
from tests.helpers.offloads import ended, offload, same, train, trained
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At


class Broken(Exception):
    """The exception that breaks a backward."""


def opened(model: torch.nn.Module, folder: Path, **more: Any) -> Any:
    section = offload("optimizer on cpu", 2, folder, update_in_backward=True)
    return offloads.opened(model, section, **more)


def backward(engine: Any, step: int, rank: int = 0) -> None:
    engine.backward(squared(engine, At(step, 0, rank)))


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
    "state.clear": (
        "optimizer.state.clear()",
        lambda engine, folder: engine.optimizer.state.clear(),
    ),
    "save_checkpoint": (
        "save_checkpoint()",
        lambda engine, folder: engine.save_checkpoint(str(folder)),
    ),
}


@pytest.mark.parametrize("what", AFTER)
def test_what_would_use_a_half_updated_model_is_refused(what, tmp_path):
    words, call = AFTER[what]

    def run(rank, model):
        engine = opened(model, tmp_path)
        train(engine, rank, range(2))
        backward(engine, 2)
        assert engine.updater.early is not None and engine.updater.updated_early
        with pytest.raises(
            PartitionError,
            match=re.escape(f"{words} comes after a backward that has updated a part of the model"),
        ):
            call(engine, tmp_path)
        if what == "state.clear":  # it goes on
            engine.step()
            engine.optimizer.state.clear()
            train(engine, rank, range(3, 4))
        engine.destroy()

    on_ranks(1, run)


@pytest.mark.parametrize("mended", [False, True])
def test_a_backward_that_breaks_after_updates_have_begun(mended, tmp_path):
    """A checkpoint mends what it has left half updated."""

    def run(rank, model):
        engine = opened(model, tmp_path)
        train(engine, rank, range(2))
        if mended:
            engine.save_checkpoint(str(tmp_path))
        with pytest.raises(PartitionError, match=f"{INCOMPLETE} .* load a checkpoint"):
            broken_backward(engine)
        if mended:
            engine.load_checkpoint(str(tmp_path))
            train(engine, rank, range(2, 4))
        return ended(engine)

    (got,) = on_ranks(1, run)
    if mended:
        section = offload("optimizer on cpu", 2, tmp_path, update_in_backward=True)
        same(got, trained(section), exact=True)


def test_windows_whose_end_is_said_from_outside(tmp_path):
    """Backwards before the last one begin nothing."""

    def run(rank, model, early):
        section = offload("optimizer on cpu", 2, tmp_path, update_in_backward=early)
        engine = offloads.opened(model, section)
        for step in range(4):
            for micro in range(3):
                engine.set_gradient_accumulation_boundary(micro == 2)
                engine.backward(squared(engine, At(step, micro, rank)) / 3)
            engine.step()
        return ended(engine)

    same(on_ranks(2, run, True)[0], on_ranks(2, run, False)[0], exact=True)
