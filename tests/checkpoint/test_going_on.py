"""Training goes on from a checkpoint bit for bit, also from a save that a thread has written; from
the middle of a window, beside another save, and after a load that failed. On other ranks and at
other stages: ranks/test_capabilities.py and test_save_load.py.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint import tensorfile, verify_checkpoint
from hf_zero.errors import CheckpointError
from tests.checkpoint.setups import (
    Setup,
    described,
    first_half,
    held,
    place,
    same,
    second_half,
    state,
    train,
)
from tests.helpers.engines import full_weights
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks

__all__ = ["held"]

# ---- in the same setup ----

SETUPS = [
    (Setup(stage=1, way="optimizer in files", precision="fp16", model="bert"), True),
    (Setup(stage=3, way="all in files", precision="bf16"), False),
]


@pytest.mark.parametrize(
    "setup, blocking",
    SETUPS,
    ids=lambda each: (
        described(each) if isinstance(each, Setup) else ("waits" if each else "beside")
    ),
)
def test_resume_is_exact(setup, blocking, tmp_path, held):
    """What a thread writes after three more steps is the state of the call."""
    setup, folder = setup.at(tmp_path), tmp_path / "run"
    trained = threading.Barrier(setup.ranks, timeout=60)
    if blocking:
        held.set()

    def whole(engine: Any, rank: int) -> Any:
        losses = first_half(engine, rank, setup, folder, blocking=blocking)
        assert blocking or not (folder / "global_step3").exists()
        assert blocking or not (folder / "latest").exists()
        trained.wait()
        held.set()
        engine.wait_for_checkpoint()
        assert (folder / "latest").read_text() == "global_step3"
        return losses, full_weights(engine)

    before = setup.run(whole)
    assert verify_checkpoint(folder).problems == ()
    resumed = run_ranks(setup.ranks, second_half, setup.models(), setup, folder)
    for (losses, weights), (found, weights_after) in zip(before, resumed):
        assert losses[-len(found) :] == found and same(weights, weights_after)


# ---- at moments that nobody plans ----

TWO = Setup()


def half_a_window(engine: Any, rank: int, step: int) -> None:
    """One micro-batch of a window of two."""
    engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, rank * 2, 0)).loss)
    engine.step()
    assert engine.window_is_open


def test_in_the_middle_of_a_window(tmp_path: Path, heard: list[str]) -> None:
    """The save leaves the window alone; who resumes begins it anew, and the loss is said."""

    def plain(engine: Any, rank: int) -> Any:
        losses, weights = train(engine, rank, range(4)), full_weights(engine)
        engine.save_checkpoint(str(tmp_path), tag="boundary")
        return losses, weights

    def saving(engine: Any, rank: int) -> Any:
        losses = train(engine, rank, range(3))
        half_a_window(engine, rank, 3)
        engine.save_checkpoint(str(tmp_path), tag="middle", blocking=False)
        engine.backward(engine(**ARCHITECTURES["gpt2"].batch(3, rank * 2 + 1, 0)).loss)
        engine.step()
        weights = full_weights(engine)
        half_a_window(engine, rank, 4)  # the load forgets it
        engine.load_checkpoint(str(tmp_path), tag="middle")
        assert engine.global_steps == 3 and not engine.window_is_open
        return losses + train(engine, rank, range(3, 4)), weights, full_weights(engine)

    expected = TWO.run(plain)
    assert not heard
    for (losses, weights), (found, gone_on, resumed) in zip(expected, TWO.run(saving)):
        assert found == losses and same(weights, gone_on) and same(weights, resumed)
    (said,) = [text for text in heard if "middle of an accumulation window" in text]
    assert str(tmp_path) in said and "1 micro-batches" in said


def test_a_load_that_failed_halfway_is_mended_by_the_next(tmp_path, monkeypatch):
    """The mixture it leaves is said to be one, on all ranks, and nothing of it stays."""
    read, broken = tensorfile.TensorFile.read_into, threading.Event()

    def failing(self: Any, name: str, start: int, out: torch.Tensor) -> None:
        if broken.is_set() and name.endswith("exp_avg_sq") and "00001-of" in self.path.name:
            raise OSError(5, "Input/output error")
        read(self, name, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "read_into", failing)

    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path), tag="a")
        there, at = state(engine), place(engine)
        losses = train(engine, rank, range(2, 4))
        torch.distributed.barrier()
        broken.set()
        with pytest.raises(CheckpointError, match=r"rank 1: .*partly loaded: load again"):
            engine.load_checkpoint(str(tmp_path))
        torch.distributed.barrier()
        broken.clear()
        torch.distributed.barrier()
        engine.load_checkpoint(str(tmp_path))
        assert same(state(engine), there) and place(engine) == at
        assert train(engine, rank, range(2, 4)) == losses

    TWO.run(run)


def test_all_that_changes_while_a_thread_writes(tmp_path: Path, held: threading.Event) -> None:
    """The state is that of the call, to the last part."""

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        models[rank].register_buffer("seen", torch.zeros(3))
        engine = TWO.open(models[rank])
        train(engine, rank, range(2))
        client = {"list": [1], "tensor": torch.zeros(2), "pair": ([1], 2)}
        engine.save_checkpoint(str(tmp_path), tag="a", client_state=client, blocking=False)
        there, at = state(engine), place(engine)
        decays = {group["weight_decay"] for group in engine.optimizer.param_groups}
        client["list"].append(2), client["tensor"].fill_(7), client["pair"][0].append(3)
        models[rank].seen.fill_(9)
        train(engine, rank, range(2, 4))
        for group in engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 123.0, 4.5
        engine.lr_scheduler.last_batch_iteration = 1000
        torch.distributed.barrier()
        held.set()
        _, found = engine.load_checkpoint(str(tmp_path))
        assert same(state(engine), there) and place(engine) == at
        assert models[rank].seen.tolist() == [0, 0, 0]
        assert found["tensor"].tolist() == [0, 0]
        assert (found["list"], found["pair"]) == ([1], ([1], 2))
        assert {group["weight_decay"] for group in engine.optimizer.param_groups} == decays
        engine.destroy()

    run_ranks(2, run, TWO.models())
