"""Saves that a thread writes: errors come to all ranks, nothing half done is seen, the state is
that of the call; loads in the middle of a window, and after one that failed.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint import (
    background_saves,
    tensorfile,
    verify_checkpoint,
)
from hf_zero.checkpoint.background_saves import BackgroundSaver
from hf_zero.checkpoint.progress import SHOWN_AFTER, progress_bar
from hf_zero.errors import CheckpointError, HostMemoryError
from tests.checkpoint.jobs import run_holds, same
from tests.checkpoint.setups import (
    Setup,
    held,
    place,
    state,
    train,
)
from tests.helpers.engines import full_weights, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks

__all__ = ["held"]


def failing_on(monkeypatch: pytest.MonkeyPatch, rank: int, number: int) -> None:
    """The thread of ``rank`` cannot write once."""
    write, left = background_saves.write_image, [1]

    def full(path: Path, *rest: Any) -> Any:
        if path.name.startswith(f"rank-{rank:05d}") and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return write(path, *rest)

    monkeypatch.setattr(background_saves, "write_image", full)


def test_a_full_disk_in_the_thread_is_raised_on_all_ranks_after_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_on(monkeypatch, 1, errno.ENOSPC)

    def run(engine: Any, rank: int) -> tuple[int, str]:
        with pytest.raises(CheckpointError, match=r"client_state\['model'\] of type object"):
            engine.save_checkpoint(str(tmp_path), client_state={"model": object()}, blocking=False)
        engine.save_checkpoint(str(tmp_path), tag="first", blocking=False)
        for step in range(1000):
            try:
                train(engine, rank, range(step, step + 1))
            except CheckpointError as error:
                told = engine.global_steps, str(error)
                break
        train(engine, rank, range(step + 1, step + 2))  # the step was complete, training goes on
        assert engine.global_steps == step + 2
        engine.save_checkpoint(str(tmp_path), tag="second", blocking=False)
        return told

    told = Setup().run(run)
    ((_, text),) = {*told}
    assert "rank-00001-of" in text and "disk is full" in text and "rank 1: " in text
    assert "Nothing was saved as 'first'" in text
    assert run_holds(tmp_path) == ["second"]


def test_an_interrupt_as_the_call_returns_leaves_the_save(tmp_path, monkeypatch):
    """The thread of the save has been started, on all ranks."""

    def starting(saver: Any, *given: Any) -> None:
        start(saver, *given)
        if saver._rank == 0:
            raise KeyboardInterrupt

    start = BackgroundSaver.start
    monkeypatch.setattr(BackgroundSaver, "start", starting)

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        engine = Setup().open(models[rank])
        interrupted = pytest.raises(KeyboardInterrupt) if rank == 0 else nullcontext()
        with interrupted:
            engine.save_checkpoint(str(tmp_path), tag="whole", blocking=False)
        engine.wait_for_checkpoint()
        engine.load_checkpoint(str(tmp_path), tag="whole")

    run_ranks(2, run, Setup().models())
    assert run_holds(tmp_path) == ["whole"]


def test_what_comes_next_raises_on_all_ranks(tmp_path, monkeypatch):
    def run(rank: int, models: list[torch.nn.Module]) -> None:
        engine = Setup().open(models[rank])
        engine.save_checkpoint(str(tmp_path), tag="good", blocking=False)
        engine.wait_for_checkpoint()
        calls = {
            "save": lambda: engine.save_checkpoint(str(tmp_path), tag="next"),
            "load": lambda: engine.load_checkpoint(str(tmp_path)),
            "wait": engine.wait_for_checkpoint,
            "destroy": engine.destroy,
        }
        for then, call in calls.items():
            if rank == 0:
                failing_on(monkeypatch, 1, errno.EIO)
            torch.distributed.barrier()
            engine.save_checkpoint(str(tmp_path), tag="bad", blocking=False)
            with pytest.raises(CheckpointError, match=r"rank 1: .*Nothing was saved as 'bad'"):
                call()
            assert (tmp_path / "latest").read_text() == "good", then
            if then != "destroy":
                engine.load_checkpoint(str(tmp_path))
            assert not (tmp_path / "bad").exists(), then

    run_ranks(2, run, Setup().models())


def refuse(numel: int, dtype: torch.dtype, huge_pages: bool) -> torch.Tensor:
    raise HostMemoryError("0.10 GB are not to be had")


@pytest.mark.parametrize("keeps", [False, True])
def test_staging_memory_is_freed_when_the_file_is_written(
    keeps: bool, tmp_path: Path, held: threading.Event
) -> None:
    """``keep_staging`` keeps it."""
    setup = Setup()

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        config = {**setup.config, "checkpoint": {"keep_staging": keeps}}
        engine = start(models[rank], setup.optimizer(models[rank]), config)
        writer = engine.background_saves.get_saver()
        engine.save_checkpoint(str(tmp_path), blocking=False)
        taken = writer.nbytes
        torch.distributed.barrier()
        held.set()
        engine.wait_for_checkpoint()
        assert taken and writer.nbytes == (taken if keeps else 0)
        engine.destroy()

    run_ranks(2, run, setup.models())


def test_without_room_or_a_store_all_ranks_write_while_training_waits(
    tmp_path: Path, heard_in_full: list[str]
) -> None:
    def run(engine: Any, rank: int) -> None:
        behind = engine.background_saves.get_saver()
        take, mail = behind._arena.take, behind._mail
        for lacks in ("room", "store"):
            if lacks == "store":
                behind._arena.take, behind._mail = take, None
            elif rank == 1:
                behind._arena.take = refuse
            engine.save_checkpoint(str(tmp_path), tag=lacks, blocking=False)
            assert (tmp_path / "latest").read_text() == lacks, "it is there when the call returns"
        behind._mail = mail

    Setup().run(run)
    for said in ("rank 1: 0.10 GB are not to be had", "share no store"):
        assert any(said in line for line in heard_in_full)
    for lacks in ("room", "store"):
        assert verify_checkpoint(tmp_path, lacks).whole


def test_a_bar_appears_for_work_that_lasts(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for progress, lasts, shown in ((None, 0.0, False), (None, 1.0, True), (False, 1.0, False)):
        with progress_bar(progress, 100, "saving run") as tick:
            tick(25)
            clock[0] += lasts * SHOWN_AFTER
            tick(75)
        assert ("saving run" in capsys.readouterr().err) == shown


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


class Unheard:
    """A mailbox whose store is lost after the ranks have begun."""

    def send(self, topic: str, number: int, word: str) -> None:
        raise RuntimeError("Connection reset by peer")

    def receive_all(self, topic: str, number: int, ranks: Sequence[int]) -> dict[int, str]:
        raise RuntimeError("Connection reset by peer")


class Half:
    """A mailbox that sends, and loses what it receives."""

    def __init__(self, mail: Any) -> None:
        self.send, self._receive = mail.send, mail.receive

    def receive(self, *word: Any) -> str:
        self._receive(*word)
        raise RuntimeError("Connection reset by peer")


def test_a_rank_that_has_lost_the_store_believes_the_folder(tmp_path, heard):
    """Rank 0 saves nothing then; others find a checkpoint that is whole."""
    said = (
        "rank 1: RuntimeError: Connection reset by peer.*Nothing was saved as 'unheard'",
        "rank 1 does not know what became of .*unheard .*rank 0 did not report",
    )

    def run(engine: Any, rank: int) -> None:
        behind = engine.background_saves.get_saver()
        mail = behind._mail
        mail._timeout = 0.5
        if rank == 0:
            behind._mail = Unheard()
        engine.save_checkpoint(str(tmp_path), tag="unheard", blocking=False)
        with pytest.raises(CheckpointError, match=said[rank]):
            engine.wait_for_checkpoint()
        torch.distributed.barrier()
        behind._mail, mail._timeout = Half(mail) if rank == 1 else mail, 60.0
        engine.save_checkpoint(str(tmp_path), tag="whole", blocking=False)
        engine.wait_for_checkpoint()

    Setup().run(run)
    assert run_holds(tmp_path) == ["whole"]
    assert any("the store is unreachable (Connection reset by peer)" in line for line in heard)
