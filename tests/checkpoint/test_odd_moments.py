"""Saves and loads at moments that nobody plans: in the middle of a window, while another is
written, after a load that failed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint import save_job, tensorfile, verify_checkpoint
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import run_holds
from tests.checkpoint.setups import (
    Elastic,
    equal,
    held,
    place,
    same,
    state,
    train,
)
from tests.helpers.engines import full_weights
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks

__all__ = ["held"]

TWO = Elastic(2, 3)


def half_a_window(engine: Any, rank: int, step: int) -> None:
    """One micro-batch of a window of two."""
    engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, rank * 2, 0)).loss)
    engine.step()
    assert engine.window_is_open


@pytest.mark.parametrize("stage, blocking", [(1, False), (3, True)])
def test_in_the_middle_of_a_window(stage, blocking, tmp_path, heard):
    """The save leaves the window alone; who resumes begins it anew, and the loss is said."""
    setup = Elastic(2, stage)

    def plain(engine: Any, rank: int) -> Any:
        losses, weights = train(engine, rank, range(4)), full_weights(engine)
        engine.save_checkpoint(str(tmp_path), tag="boundary")
        return losses, weights

    def saving(engine: Any, rank: int) -> Any:
        losses = train(engine, rank, range(3))
        half_a_window(engine, rank, 3)
        engine.save_checkpoint(str(tmp_path), tag="middle", blocking=blocking)
        engine.backward(engine(**ARCHITECTURES["gpt2"].batch(3, rank * 2 + 1, 0)).loss)
        engine.step()
        weights = full_weights(engine)
        half_a_window(engine, rank, 4)  # the load forgets it
        engine.load_checkpoint(str(tmp_path), tag="middle")
        assert engine.global_steps == 3 and not engine.window_is_open
        return losses + train(engine, rank, range(3, 4)), weights, full_weights(engine)

    expected = setup.run(plain)
    assert not heard
    for (losses, weights), (found, gone_on, resumed) in zip(expected, setup.run(saving)):
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
        assert equal(state(engine), there) and place(engine) == at
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
        client["list"].append(2), client["tensor"].fill_(7), client["pair"][0].append(3)
        models[rank].seen.fill_(9)
        train(engine, rank, range(2, 4))
        for group in engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 123.0, 4.5
        engine.lr_scheduler.last_epoch = 1000
        torch.distributed.barrier()
        held.set()
        _, found = engine.load_checkpoint(str(tmp_path))
        assert equal(state(engine), there) and place(engine) == at
        assert models[rank].seen.tolist() == [0, 0, 0]
        assert found["tensor"].tolist() == [0, 0]
        assert (found["list"], found["pair"]) == ([1], ([1], 2))
        decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
        assert sorted(decays) == [0.0, 0.1]
        engine.destroy()

    run_ranks(2, run, TWO.models())


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_waits_follows_one_of_the_same_tag_that_a_thread_writes(
    tmp_path: Path,
    held: threading.Event,
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
    heard_in_full: list[str],
) -> None:
    """Where the thread fails on one rank, all ranks hear of it and can save again."""
    write = save_job.write_image

    def failing(path: Path, *rest: Any) -> Any:
        if fails and path.name.startswith("rank-00001"):
            raise OSError(28, "No space left on device", str(path))
        return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", failing)

    def release() -> None:
        while not any("which is still being written" in line for line in heard_in_full):
            threading.Event().wait(0.01)
        held.set()

    def run(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        first = {"which": "thread"}
        engine.save_checkpoint(str(tmp_path), tag="a", client_state=first, blocking=False)
        train(engine, rank, range(1, 2))
        there = state(engine)
        later = {"tag": "a", "client_state": {"which": "later"}}
        if rank == 0:
            threading.Thread(target=release, daemon=True).start()
        if fails:
            with pytest.raises(CheckpointError, match=r"rank 1: .*Nothing was saved as 'a'"):
                engine.save_checkpoint(str(tmp_path), **later)
        engine.save_checkpoint(str(tmp_path), **later)
        train(engine, rank, range(2, 3))
        assert engine.load_checkpoint(str(tmp_path), verify=True)[1] == {"which": "later"}
        assert equal(state(engine), there) and engine.global_steps == 2

    TWO.run(run)
    assert run_holds(tmp_path) == ["a"]
    assert verify_checkpoint(tmp_path).whole
