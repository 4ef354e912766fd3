"""Saves that a thread writes: the state is that of the call, errors come to all ranks, nothing
half done is ever seen.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
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
from hf_zero.logging import logger
from hf_zero.zero.layout.sharding import persistent_buffers
from tests.checkpoint.jobs import run_holds
from tests.checkpoint.test_engine import Setup, second_half, train
from tests.checkpoint.test_offloaded import Away, described
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights, start
from tests.helpers.ranks import run_ranks


@pytest.fixture
def held(monkeypatch):
    """Threads write only once the lock that this gives is free."""
    lock, write = threading.Lock(), save_job.write_image

    def waiting(path, *rest):
        with lock:
            return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", waiting)
    return lock


@pytest.fixture
def heard(monkeypatch):
    lines: list[str] = []
    for name in ("warning", "info"):
        monkeypatch.setattr(
            logger, name, lambda text, *args: lines.append(text % args if args else text)
        )
    return lines


def failing_on(monkeypatch, rank: int, number: int, times: int = 1) -> None:
    """The thread of ``rank`` cannot write, ``times`` times."""
    write, left = save_job.write_image, [times]

    def full(path, *rest):
        if path.name.startswith(f"rank-{rank:05d}") and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", full)


WAYS = [
    Away(stage=0, ranks=1),
    Away(stage=1, precision="fp16", model="bert"),
    Away(stage=2, precision="bf16", model="llama"),
    Away(stage=3),
    Away(stage=3, ranks=4, frozen="h.0"),
    Away(stage=2, way="optimizer on cpu", moments="int8"),
    Away(stage=1, way="optimizer in files", precision="bf16"),
    Away(stage=3, way="all in files"),
]


def saved_behind(
    rank: int,
    models: list[torch.nn.Module],
    setup: Away,
    folder: Path,
    held: threading.Lock,
    trained: threading.Barrier,
) -> Any:
    engine = setup.open(models[rank])
    train(engine, rank, range(3), setup.model)
    state = {"step": 3}
    engine.save_checkpoint(str(folder), client_state=state, blocking=False)
    state["step"] = 99
    after = train(engine, rank, range(3, 6), setup.model)
    assert not (folder / "global_step3").exists() and not (folder / "latest").exists(), (
        "it was written before training went on"
    )
    if trained.wait() == 0:
        held.release()
    engine.wait_for_checkpoint()
    assert (folder / "latest").read_text() == "global_step3"
    weights = full_weights(engine)
    engine.destroy()
    return after, weights


@pytest.mark.parametrize(
    "setup", fast(WAYS, lambda setup: WAYS.index(setup) not in (0, 3, 6)), ids=described
)
def test_training_goes_on_and_what_is_saved_is_of_the_call(
    setup: Away, tmp_path: Path, held: threading.Lock
) -> None:
    """The steps after the call are repeated bit for bit from what was saved, whatever they
    changed before it was written.
    """
    (tmp_path / "disk").mkdir()
    setup = dataclasses.replace(setup, folder=tmp_path / "disk")
    held.acquire()
    whole = run_ranks(
        setup.ranks,
        saved_behind,
        setup.models(),
        setup,
        tmp_path / "run",
        held,
        threading.Barrier(setup.ranks, timeout=50),
    )
    assert verify_checkpoint(tmp_path / "run").problems == ()
    resumed = run_ranks(setup.ranks, second_half, setup.models(), setup, tmp_path / "run")
    for (losses, weights), (losses_after, weights_after) in zip(whole, resumed):
        assert losses == losses_after
        assert all(torch.equal(weights[name], weights_after[name]) for name in weights)


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The data of each rank's file, behind its header (which names the save)."""
    found = {}
    for path in folder.glob("rank-*"):
        content = path.read_bytes()
        found[path.name] = content[8 + int.from_bytes(content[:8], "little") :]
    return found


@pytest.mark.parametrize("stage", range(4))
def test_both_ways_write_the_same_bytes_and_each_byte_of_state_once(
    stage: int, tmp_path: Path
) -> None:
    setup = Setup(stage=stage)

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

    expected = setup.run(run)[0]
    waits, beside = tensors_of(tmp_path / "waits"), tensors_of(tmp_path / "beside")
    assert waits == beside and len(waits) == 2
    assert sum(map(len, waits.values())) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_in_the_thread_is_raised_on_all_ranks_after_the_same_step(
    tmp_path: Path, monkeypatch, ranks: int
) -> None:
    setup = Setup(ranks=ranks)
    failing_on(monkeypatch, ranks - 1, errno.ENOSPC)

    def run(engine: Any, rank: int) -> tuple[int, str]:
        engine.save_checkpoint(str(tmp_path), tag="first", blocking=False)
        step, limit = 0, time.monotonic() + 50
        while True:
            assert time.monotonic() < limit, "nobody heard of it"
            try:
                train(engine, rank, range(step, step + 1))
            except CheckpointError as error:
                told = engine.global_steps, str(error)
                break
            step += 1
        train(engine, rank, range(step + 1, step + 3))  # the step was complete, training goes on
        assert engine.global_steps == step + 3
        engine.save_checkpoint(str(tmp_path), tag="second", blocking=False)
        return told

    heard = setup.run(run)
    assert len(set(heard)) == 1, heard
    assert "disk is full: free space" in heard[0][1] and f"rank-{ranks - 1:05d}-of" in heard[0][1]
    assert "Nothing was saved as 'first'; earlier checkpoints are as they were" in heard[0][1]
    assert ranks == 1 or "rank 1: " in heard[0][1]
    assert run_holds(tmp_path) == ["second"]


@pytest.mark.parametrize("then", ["save", "load", "wait", "destroy"])
def test_what_comes_next_raises_on_all_ranks(tmp_path: Path, monkeypatch, then: str) -> None:
    setup = Setup()

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        engine = setup.open(models[rank])
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
        with pytest.raises(
            CheckpointError, match=r"rank 1: .*check the storage.*Nothing was saved as 'bad'"
        ):
            calls[then]()
        if then != "destroy":
            engine.load_checkpoint(str(tmp_path))
            engine.save_checkpoint(str(tmp_path), tag="next")
            engine.destroy()

    run_ranks(2, run, setup.models())
    assert (tmp_path / "latest").read_text() == ("good" if then == "destroy" else "next")
    assert not (tmp_path / "bad").exists()


def test_a_second_save_and_a_load_wait_for_the_first(
    tmp_path: Path, held: threading.Lock, heard: list[str]
) -> None:
    setup = Setup()

    def release() -> None:
        while not any("which is still being written" in line for line in heard):
            time.sleep(0.01)
        held.release()

    def run(engine: Any, rank: int) -> Any:
        held.acquire() if rank == 0 else None
        torch.distributed.barrier()
        engine.save_checkpoint(str(tmp_path), tag="one", blocking=False)
        memory = engine.async_saves.writer.nbytes
        if rank == 0:
            threading.Thread(target=release, daemon=True).start()
        engine.save_checkpoint(str(tmp_path), tag="two", blocking=False)
        assert (tmp_path / "one").is_dir() and engine.async_saves.writer.nbytes == memory, (
            "staging memory is reused"
        )
        path, _ = engine.load_checkpoint(str(tmp_path))
        return path

    assert setup.run(run) == [str(tmp_path / "two")] * 2
    assert any(
        f"the save of {tmp_path} waits for {tmp_path / 'one'}, which is still being written" in line
        for line in heard
    )
    assert any(
        f"saved {tmp_path / 'one'} in the background: " in line and "; training waited" in line
        for line in heard
    )


def test_a_wait_that_is_interrupted_leaves_the_thread_its_memory(
    tmp_path: Path, held: threading.Lock, monkeypatch
) -> None:
    def run(rank: int, models: list[torch.nn.Module]) -> None:
        def interrupt(self: Any, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        engine = Setup(ranks=1).open(models[rank])
        held.acquire()
        engine.save_checkpoint(str(tmp_path), tag="first", blocking=False)
        with monkeypatch.context() as patch:
            patch.setattr(save_job.Future, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.save_checkpoint(str(tmp_path), tag="second", blocking=False)
        threading.Timer(0.2, held.release).start()
        engine.save_checkpoint(str(tmp_path), tag="third", blocking=False)
        assert (tmp_path / "first").is_dir(), "the next save waited for it all the same"
        engine.destroy()

    run_ranks(1, run, Setup(ranks=1).models())
    assert verify_checkpoint(tmp_path, "first").problems == ()
    assert verify_checkpoint(tmp_path, "third").problems == ()


class Killed(BaseException):
    """Nothing after it runs in this thread."""


@pytest.mark.parametrize("at", ["staged", "written", "manifest", "renamed"])
def test_killed_between_the_copy_and_the_end(tmp_path: Path, monkeypatch, at: str) -> None:
    """The earlier checkpoint survives; the new one is either complete or invisible."""
    setup = Setup(ranks=1)

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    def run(engine: Any, rank: int) -> None:
        engine.save_checkpoint(str(tmp_path), tag="old")
        train(engine, rank, range(1))
        module, name = {
            "staged": (save_job, "write_image"),
            "written": (save_job.SaveJob, "_publish"),
            "manifest": (commit, "publish_folder"),
            "renamed": (save_job.SaveJob, "_finish"),
        }[at]
        with monkeypatch.context() as patch:
            patch.setattr(module, name, die)
            engine.save_checkpoint(str(tmp_path), tag="new", blocking=False)
            with pytest.raises(Killed):
                engine.wait_for_checkpoint()
        assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "old")
        assert (tmp_path / "new").exists() == (at == "renamed")
        assert not (tmp_path / "new").exists() or verify_checkpoint(tmp_path, "new").problems == ()
        engine.save_checkpoint(str(tmp_path), tag="new", blocking=False)

    setup.run(run)
    assert (tmp_path / "latest").read_text() == "new" and verify_checkpoint(tmp_path).problems == ()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_without_room_for_a_copy_all_ranks_write_while_training_waits(
    tmp_path: Path, monkeypatch, heard: list[str]
) -> None:
    setup = Setup()

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        def refuse(self: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
            raise HostMemoryError("0.10 GB are not to be had")

        engine = setup.open(models[rank])
        if rank == 1:
            behind = engine.async_saves.get_writer()
            behind._arena.take = refuse.__get__(behind._arena)
        engine.save_checkpoint(str(tmp_path), blocking=False)
        assert (tmp_path / "latest").exists(), "it is there when the call returns"
        engine.destroy()

    run_ranks(2, run, setup.models())
    assert any(
        "written while training waits" in line and "rank 1: 0.10 GB are not to be had" in line
        for line in heard
    )
    assert verify_checkpoint(tmp_path).problems == ()


def test_the_configuration_asks_for_it(tmp_path: Path, held: threading.Lock) -> None:
    for section in ({"async_save": True}, {"writer": {"type": "FAST", "decoupled": True}}):

        def run(rank: int, section: Any = section) -> None:
            setup = Setup(ranks=1)
            config = {**setup.config, "checkpoint": section}
            model = setup.models()[0]
            engine = start(model, setup.optimizer(model), config)
            held.acquire()
            engine.save_checkpoint(str(tmp_path), tag="a")
            assert not (tmp_path / "a").exists()
            held.release()
            engine.save_checkpoint(str(tmp_path), tag="b", blocking=True)
            assert (tmp_path / "a").exists() and (tmp_path / "latest").read_text() == "b"
            engine.destroy()

        run_ranks(1, run)
        for tag in ("a", "b"):
            shutil.rmtree(tmp_path / tag)


def test_client_state_that_cannot_be_saved_is_raised_at_the_call(tmp_path: Path) -> None:
    def run(engine: Any, rank: int) -> None:
        with pytest.raises(
            CheckpointError, match=r"client_state\['model'\] of type object cannot be saved"
        ):
            engine.save_checkpoint(str(tmp_path), client_state={"model": object()}, blocking=False)
        engine.wait_for_checkpoint()

    Setup().run(run)
    assert list(tmp_path.iterdir()) == []


def test_a_bar_appears_for_work_that_lasts(monkeypatch, capsys) -> None:
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(storage.sys.stderr, "isatty", lambda: True, raising=False)
    with storage.progress_bar(None, 100, "saving run") as tick:
        tick(50)
    assert "saving run" not in capsys.readouterr().err, "it was over at once"
    with storage.progress_bar(None, 100, "saving run") as tick:
        tick(25)
        clock[0] = storage.SHOWN_AFTER
        tick(75)
    assert "saving run" in capsys.readouterr().err
    with storage.progress_bar(False, 100, "saving run") as tick:
        tick(100)
    assert "saving run" not in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_alone_shows_a_bar_that_counts_all_its_bytes(
    ranks: int, tmp_path: Path, monkeypatch
) -> None:
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
        train(engine, rank, range(1))
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


def test_a_rank_that_has_lost_the_store_believes_the_folder(
    tmp_path: Path, heard: list[str]
) -> None:
    """Rank 0 cannot hear of the others and saves nothing; with its own word lost, the others
    find a checkpoint that is whole.
    """
    setup = Setup()

    def run(engine: Any, rank: int) -> None:
        behind = engine.async_saves.get_writer()
        mail = behind._mail
        mail._timeout = 0.5
        if rank == 0:
            behind._mail = Unheard()
        engine.save_checkpoint(str(tmp_path), tag="unheard", blocking=False)
        match = (
            "rank 1: RuntimeError: Connection reset by peer.*Nothing was saved as 'unheard'",
            "rank 1 does not know what became of .*unheard .*rank 0 did not report.*hf-zero verify",
        )[rank]
        with pytest.raises(CheckpointError, match=match):
            engine.wait_for_checkpoint()
        torch.distributed.barrier()
        behind._mail, mail._timeout = mail, 60.0
        if rank == 1:
            send, receive = mail.send, mail.receive

            class Half:
                def send(self, *word: Any) -> None:
                    send(*word)

                def receive(self, *word: Any) -> str:
                    receive(*word)
                    raise RuntimeError("Connection reset by peer")

            behind._mail = Half()
        engine.save_checkpoint(str(tmp_path), tag="whole", blocking=False)
        engine.wait_for_checkpoint()

    setup.run(run)
    assert run_holds(tmp_path) == ["whole"]
    assert any(
        "could not notify the other ranks: the store is unreachable (Connection reset by peer)"
        in line
        for line in heard
    )


def test_a_group_without_a_store_saves_while_training_waits(
    tmp_path: Path, heard: list[str]
) -> None:
    def run(engine: Any, rank: int) -> None:
        engine.async_saves.get_writer()._mail = None
        engine.save_checkpoint(str(tmp_path), blocking=False)
        assert (tmp_path / "latest").exists()

    Setup().run(run)
    assert any("the ranks of this process group share no store" in line for line in heard)


def test_latest_that_cannot_be_moved(tmp_path: Path, monkeypatch) -> None:
    def failing(source: Any, target: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", str(target))

    def run(engine: Any, rank: int) -> None:
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(commit.os, "replace", failing)
            engine.save_checkpoint(str(tmp_path), tag="a", blocking=False)
            with pytest.raises(CheckpointError, match="a itself is whole; pass its tag to load it"):
                engine.wait_for_checkpoint()
        torch.distributed.barrier()
        engine.load_checkpoint(str(tmp_path), tag="a")

    Setup().run(run)
