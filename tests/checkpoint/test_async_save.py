"""Saves that a thread writes: errors come to all ranks, nothing half done is ever seen. That the
state is that of the call: test_elastic.py, test_odd_moments.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint import (
    commit,
    load_sharded,
    save_job,
    save_sharded,
    storage,
    verify_checkpoint,
)
from hf_zero.checkpoint.engine_state import rng_states
from hf_zero.errors import CheckpointError, HostMemoryError
from hf_zero.zero.layout.sharding import persistent_buffers
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


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The data of each rank's file, behind its header (which names the save)."""
    files = {path.name: path.read_bytes() for path in folder.glob("rank-*")}
    return {name: data[8 + int.from_bytes(data[:8], "little") :] for name, data in files.items()}


@pytest.mark.parametrize("stage", [0, 3])
def test_both_ways_write_the_same_bytes_and_each_byte_of_state_once(stage, tmp_path):
    def run(engine: Any, rank: int) -> int:
        train(engine, rank, range(2))
        state = torch.get_rng_state()
        engine.save_checkpoint(str(tmp_path), tag="waits")
        torch.set_rng_state(state)
        engine.save_checkpoint(str(tmp_path), tag="beside", blocking=False)
        engine.wait_for_checkpoint()
        buffers = sum(b.nbytes for b in persistent_buffers(engine.module).values())
        numel = sum(flat.layout.numel for flat in engine.flats)
        # masters and two moments; padding is written, too
        generators = sum(each.nbytes for each in rng_states().values())
        return 3 * 4 * numel + buffers + 2 * generators

    expected = Setup(stage=stage).run(run)[0]
    waits, beside = tensors_of(tmp_path / "waits"), tensors_of(tmp_path / "beside")
    assert waits == beside and len(waits) == 2
    assert sum(map(len, waits.values())) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_in_the_thread_is_raised_on_all_ranks_after_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    failing_on(monkeypatch, ranks - 1, errno.ENOSPC)

    def run(engine: Any, rank: int) -> tuple[int, str]:
        engine.save_checkpoint(str(tmp_path), tag="first", blocking=False)
        for step in range(1000):
            try:
                train(engine, rank, range(step, step + 1))
            except CheckpointError as error:
                told = engine.global_steps, str(error)
                break
        train(engine, rank, range(step + 1, step + 3))  # the step was complete, training goes on
        assert engine.global_steps == step + 3
        engine.save_checkpoint(str(tmp_path), tag="second", blocking=False)
        return told

    told = Setup(ranks=ranks).run(run)
    ((_, text),) = {*told}
    assert f"rank-{ranks - 1:05d}-of" in text and "disk is full" in text
    assert "Nothing was saved as 'first'" in text
    assert ranks == 1 or "rank 1: " in text
    assert run_holds(tmp_path) == ["second"]


@pytest.mark.parametrize("then", ["save", "load", "wait", "destroy"])
def test_what_comes_next_raises_on_all_ranks(tmp_path, monkeypatch, then):
    def run(rank: int, models: list[torch.nn.Module]) -> None:
        engine = Setup().open(models[rank])
        engine.save_checkpoint(str(tmp_path), tag="good", blocking=False)
        engine.wait_for_checkpoint()
        if rank == 0:
            failing_on(monkeypatch, 1, errno.EIO)
        torch.distributed.barrier()
        engine.save_checkpoint(str(tmp_path), tag="bad", blocking=False)
        calls = {
            "save": lambda: engine.save_checkpoint(str(tmp_path), tag="next"),
            "load": lambda: engine.load_checkpoint(str(tmp_path)),
            "wait": engine.wait_for_checkpoint,
            "destroy": engine.destroy,
        }
        with pytest.raises(CheckpointError, match=r"rank 1: .*Nothing was saved as 'bad'"):
            calls[then]()
        if then != "destroy":
            engine.load_checkpoint(str(tmp_path))
            engine.save_checkpoint(str(tmp_path), tag="next")
            engine.destroy()

    run_ranks(2, run, Setup().models())
    assert (tmp_path / "latest").read_text() == ("good" if then == "destroy" else "next")
    assert not (tmp_path / "bad").exists()


def test_a_second_save_and_a_load_wait_for_the_first(tmp_path, held, heard_in_full):
    """A wait that is interrupted leaves the thread its memory, which the next save uses again."""
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
        assert (tmp_path / "one").is_dir() and engine.async_saves.writer.nbytes == memory
        return engine.load_checkpoint(str(tmp_path))[0]

    assert Setup(ranks=1).run(run) == [str(tmp_path / "three")]
    assert run_holds(tmp_path) == ["one", "three"]
    assert verify_checkpoint(tmp_path, "one").whole
    told = f"saved {tmp_path / 'one'} in the background: "
    assert any(told in line and "; training waited" in line for line in heard_in_full)


class Killed(BaseException):
    """Nothing after it runs in this thread."""


POINTS = {
    "staged": (save_job, "write_image"),
    "written": (save_job.SaveJob, "_publish"),
    "manifest": (commit, "publish_folder"),
    "renamed": (save_job.SaveJob, "_finish"),
}


def test_killed_between_the_copy_and_the_end(tmp_path, monkeypatch):
    """The earlier checkpoint survives; the new one is either complete or invisible."""

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    def run(engine: Any, rank: int) -> None:
        for at, (module, name) in POINTS.items():
            folder = tmp_path / at
            engine.save_checkpoint(str(folder), tag="old")
            with monkeypatch.context() as patch:
                patch.setattr(module, name, die)
                engine.save_checkpoint(str(folder), tag="new", blocking=False)
                with pytest.raises(Killed):
                    engine.wait_for_checkpoint()
            assert engine.load_checkpoint(str(folder))[0] == str(folder / "old")
            assert (folder / "new").exists() == (at == "renamed")
            assert at != "renamed" or verify_checkpoint(folder, "new").whole
            engine.save_checkpoint(str(folder), tag="new", blocking=False)
            engine.wait_for_checkpoint()
            assert (folder / "latest").read_text() == "new" and verify_checkpoint(folder).whole
            assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]

    Setup(ranks=1).run(run)


@pytest.mark.parametrize("lacks", ["room", "store"])
def test_without_room_or_a_store_all_ranks_write_while_training_waits(
    tmp_path: Path, heard_in_full: list[str], lacks: str
) -> None:
    def refuse(self: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise HostMemoryError("0.10 GB are not to be had")

    def run(engine: Any, rank: int) -> None:
        behind = engine.async_saves.get_writer()
        if lacks == "store":
            behind._mail = None
        elif rank == 1:
            behind._arena.take = refuse.__get__(behind._arena)
        engine.save_checkpoint(str(tmp_path), blocking=False)
        assert (tmp_path / "latest").exists(), "it is there when the call returns"

    Setup().run(run)
    said = "rank 1: 0.10 GB are not to be had" if lacks == "room" else "share no store"
    assert any(said in line for line in heard_in_full)
    assert verify_checkpoint(tmp_path).whole


def test_the_configuration_asks_for_it(tmp_path: Path, held: threading.Event) -> None:
    setup = Setup(ranks=1)

    def run(rank: int, section: Any) -> None:
        held.clear()
        model = setup.models()[0]
        config = {**setup.config, "checkpoint": section}
        engine = start(model, setup.optimizer(model), config)
        engine.save_checkpoint(str(tmp_path), tag="a")
        assert not (tmp_path / "a").exists()
        held.set()
        engine.save_checkpoint(str(tmp_path), tag="b", blocking=True)
        assert (tmp_path / "a").exists() and (tmp_path / "latest").read_text() == "b"
        engine.destroy()

    for section in ({"async_save": True}, {"writer": {"type": "FAST", "decoupled": True}}):
        run_ranks(1, run, section)
        for tag in ("a", "b"):
            shutil.rmtree(tmp_path / tag)


def test_client_state_that_cannot_be_saved_is_raised_at_the_call(tmp_path: Path) -> None:
    def run(engine: Any, rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"client_state\['model'\] of type object"):
            engine.save_checkpoint(str(tmp_path), client_state={"model": object()}, blocking=False)
        engine.wait_for_checkpoint()

    Setup().run(run)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_alone_shows_a_bar_that_counts_all_its_bytes(ranks, tmp_path, monkeypatch):
    shown: list[list[int]] = []

    @contextmanager
    def counted(progress: bool | None, total: int, what: str) -> Iterator[Any]:
        ticks: list[int] = []
        yield ticks.append
        if progress is None:
            assert sum(ticks) == total > 0, what
            shown.append(ticks)

    for module in (save_sharded, load_sharded):
        monkeypatch.setattr(module, "progress_bar", counted)

    def run(engine: Any, rank: int) -> None:
        engine.save_checkpoint(str(tmp_path))
        engine.load_checkpoint(str(tmp_path))

    Setup(ranks=ranks).run(run)
    assert len(shown) == 2


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
        behind = engine.async_saves.get_writer()
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


def test_latest_that_cannot_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(source: Any, target: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", str(target))

    def run(engine: Any, rank: int) -> None:
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(commit.os, "replace", failing)
            engine.save_checkpoint(str(tmp_path), tag="a", blocking=False)
            with pytest.raises(CheckpointError, match="a itself is whole"):
                engine.wait_for_checkpoint()
        torch.distributed.barrier()
        engine.load_checkpoint(str(tmp_path), tag="a")

    Setup().run(run)
