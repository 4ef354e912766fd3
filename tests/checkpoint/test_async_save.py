"""Saves that a thread writes: errors come to all ranks, nothing half done is ever seen. That the
state is that of the call: test_going_on.py.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint import (
    save_job,
    storage,
    verify_checkpoint,
)
from hf_zero.errors import CheckpointError, HostMemoryError
from tests.checkpoint.jobs import run_holds
from tests.checkpoint.setups import Setup, held, train
from tests.helpers.engines import start
from tests.helpers.ranks import run_ranks

__all__ = ["held"]


def failing_on(monkeypatch: pytest.MonkeyPatch, rank: int, number: int) -> None:
    """The thread of ``rank`` cannot write once."""
    write, left = save_job.write_image, [1]

    def full(path: Path, *rest: Any) -> Any:
        if path.name.startswith(f"rank-{rank:05d}") and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", full)


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


def test_a_second_save_and_a_load_wait_for_the_first(tmp_path, held, heard_in_full):
    """A wait that is interrupted leaves the thread its memory."""
    waits = f"the save of {tmp_path} waits for {tmp_path / 'one'}, which is still being written"

    def release() -> None:
        while not any(waits in line for line in heard_in_full):
            threading.Event().wait(0.01)
        held.set()

    def interrupt(self: Any, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    def run(engine: Any, rank: int) -> Any:
        engine.save_checkpoint(str(tmp_path), tag="one", blocking=False)
        memory = engine.async_saves.writer.nbytes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save_job.Future, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.save_checkpoint(str(tmp_path), tag="two", blocking=False)
        assert not (tmp_path / "one").exists()
        heard_in_full.clear()
        threading.Thread(target=release, daemon=True).start()
        engine.save_checkpoint(str(tmp_path), tag="three", blocking=False)
        assert memory and (tmp_path / "one").is_dir()
        return engine.load_checkpoint(str(tmp_path))[0]

    assert Setup(ranks=1).run(run) == [str(tmp_path / "three")]
    assert run_holds(tmp_path) == ["one", "three"]
    assert verify_checkpoint(tmp_path, "one").whole
    told = f"saved {tmp_path / 'one'} in the background: "
    assert any(told in line and "; training waited" in line for line in heard_in_full)


def refuse(numel: int, dtype: torch.dtype, huge_pages: bool) -> torch.Tensor:
    raise HostMemoryError("0.10 GB are not to be had")


@pytest.mark.parametrize("keeps", [False, True])
def test_staging_memory_is_freed_when_the_file_is_written(
    keeps: bool, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another rank has no room for its copy; ``keep_staging`` keeps it."""
    setup = Setup()
    commit, seen = save_job.SaveJob._publish, []

    def publish(self: Any, *rest: Any) -> str:
        seen.append(writers[0].nbytes)
        return commit(self, *rest)

    monkeypatch.setattr(save_job.SaveJob, "_publish", publish)
    writers: dict[int, Any] = {}

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        config = {**setup.config, "checkpoint": {"keep_staging": keeps}}
        engine = start(models[rank], setup.optimizer(models[rank]), config)
        writer = writers[rank] = engine.async_saves.get_writer()
        taken = []
        for tag in ("one", "two"):
            held.clear()
            torch.distributed.barrier()
            engine.save_checkpoint(str(tmp_path), tag=tag, blocking=False)
            taken.append(writer.nbytes)
            torch.distributed.barrier()
            held.set()
            engine.wait_for_checkpoint()
            assert writer.nbytes == (taken[0] if keeps else 0)
        assert taken == taken[:1] * 2 and taken[0] > 0
        if rank == 1 and not keeps:  # all ranks write in the call
            writer._arena.take = refuse
        engine.save_checkpoint(str(tmp_path), tag="three", blocking=False)
        if not keeps:
            assert writer._image is None
        engine.wait_for_checkpoint()
        assert writer.nbytes == (taken[0] if keeps else 0)
        engine.destroy()

    run_ranks(2, run, setup.models())
    assert all(bool(nbytes) == keeps for nbytes in seen)


def test_without_room_or_a_store_all_ranks_write_while_training_waits(
    tmp_path: Path, heard_in_full: list[str]
) -> None:
    def run(engine: Any, rank: int) -> None:
        behind = engine.async_saves.get_writer()
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


def test_the_configuration_asks_for_it(tmp_path: Path, held: threading.Event) -> None:
    setup = Setup(ranks=1)

    def run(rank: int) -> None:
        model = setup.models()[0]
        config = {**setup.config, "checkpoint": {"async_save": True}}
        engine = start(model, setup.optimizer(model), config)
        engine.save_checkpoint(str(tmp_path), tag="a")
        assert not (tmp_path / "a").exists()
        held.set()
        engine.save_checkpoint(str(tmp_path), tag="b", blocking=True)
        assert (tmp_path / "a").exists() and (tmp_path / "latest").read_text() == "b"
        engine.destroy()

    run_ranks(1, run)


def test_a_bar_appears_for_work_that_lasts(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(storage.sys.stderr, "isatty", lambda: True, raising=False)
    for progress, lasts, shown in ((None, 0.0, False), (None, 1.0, True), (False, 1.0, False)):
        with storage.progress_bar(progress, 100, "saving run") as tick:
            tick(25)
            clock[0] += lasts * storage.SHOWN_AFTER
            tick(75)
        assert ("saving run" in capsys.readouterr().err) == shown
