"""Disks that fail under a running engine, and engines that end in the middle of an update."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.errors import (
    CheckpointError,
    ConfigError,
    DiskSpaceError,
    OffloadError,
    RankMismatchError,
)
from hf_zero.ops.files import parse_faults
from hf_zero.optim.sub_group_update import Update
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, Plan, adamw

WAYS = [("optimizer in files", 0), ("optimizer in files", 2), ("all in files", 3)]


def opened(model: torch.nn.Module, way: str, stage: int, folder: Path, **more: Any) -> Any:
    section = offload(way, stage, folder)
    if way == "all in files":
        section["offload_param"]["max_in_cpu"] = 0
    return start(
        model, adamw(model), config_of(stage, Plan(clip=1.0, **more), zero_optimization=section)
    )


def train(engine: Any, rank: int, steps: range) -> None:
    for step in steps:
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()


def inject(engine: Any, fault: str) -> None:
    """``fault`` happens on this rank from now on, as HF_ZERO_IO_FAULT would have it on all."""
    for files in engine.sharded_model.placement._files.values():
        files._queue.inject(parse_faults(fault))


def after(ranks: int, stage: int, steps: int) -> dict[str, torch.Tensor]:
    """Weights without any fault, on the device."""

    def run(rank: int, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        engine = start(model, adamw(model), config_of(stage, Plan(clip=1.0)))
        train(engine, rank, range(steps))
        weights = full_weights(engine)
        engine.destroy()
        return weights

    return on_ranks(ranks, run)[0]


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("write:1:ENOSPC", marks=pytest.mark.long),
        "write:7+:EIO",
        pytest.param("write:2+:ENOSPC", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("way, stage", WAYS)
def test_a_disk_that_is_full_loses_no_step(
    way: str, stage: int, fault: str, tmp_path: Path
) -> None:
    """On one rank of two: the step is complete, the next one is refused on both, and what is
    saved goes on elsewhere.
    """
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()

    def run(rank: int, model: torch.nn.Module) -> None:
        engine = opened(model, way, stage, disk)
        train(engine, rank, range(2))
        engine.updater.finish()
        engine.sharded_model.placement.write_error()
        if rank == 1:
            inject(engine, fault)
        train(engine, rank, range(2, 3))
        for _ in range(2):
            engine.backward(squared(engine, At(3, 0, rank)))
            with pytest.raises(
                OffloadError,
                match=rf"rank 1: .*writing .* of rank 1; its values.*{disk}.*save a checkpoint now",
            ):
                engine.step()
            engine.zero_grad()
        same(full_weights(engine), want_three)
        engine.save_checkpoint(str(saved))
        engine.destroy()

    def resume(rank: int, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        engine = start(model, adamw(model), config_of(3 - stage, Plan(clip=1.0)))
        engine.load_checkpoint(str(saved))
        assert engine.global_steps == 3
        train(engine, rank, range(3, 5))
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want_three, want_five = after(2, stage, 3), after(2, stage, 5)
    on_ranks(2, run)
    same(on_ranks(2, resume)[0], want_five)


@pytest.mark.turns
@pytest.mark.parametrize(
    "fault", ["read:1+:short,write:1+:short", "read:2:slow=30,write:3:slow=30"]
)
@pytest.mark.parametrize("way, stage", WAYS)
def test_short_and_slow_transfers_change_nothing(
    way: str, stage: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_IO_FAULT", fault)

    def run(rank: int, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        engine = opened(model, way, stage, tmp_path)
        train(engine, rank, range(3))
        weights = full_weights(engine)
        engine.destroy()
        return weights

    same(on_ranks(2, run)[0], after(2, stage, 3))


@pytest.mark.parametrize("way, stage", WAYS)
def test_what_cannot_be_read_is_said_wherever_it_is_needed_and_never_saved(
    way: str, stage: int, tmp_path: Path
) -> None:
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()

    def run(rank: int, model: torch.nn.Module) -> None:
        engine = opened(model, way, stage, disk)
        train(engine, rank, range(1))
        engine.updater.finish()
        inject(engine, "read:1+:EIO")
        with pytest.raises(OSError, match=r"reading .* of rank 0") as raised:
            train(engine, rank, range(1, 3))
        assert raised.value.errno == errno.EIO and raised.value.filename.startswith(str(disk))
        with pytest.raises(CheckpointError, match="Input/output error"):
            engine.save_checkpoint(str(saved))
        assert not list(saved.glob("global_step*"))
        try:
            engine.destroy()
        except OSError as error:
            assert error.errno == errno.EIO
        engine.destroy()

    on_ranks(1, run)
    gc.collect()
    assert not list(disk.iterdir())


def held_files(folder: Path) -> list[str]:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [
        target
        for link in links
        if link.is_symlink() and str(folder) in (target := os.readlink(link))
    ]


def update_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("hf-zero update")
    ]


@pytest.mark.turns
@pytest.mark.parametrize(
    "how", ["destroy", "drop", "exception", pytest.param("interrupt", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("way, stage", WAYS)
def test_threads_and_files_go_with_the_engine(
    way: str, stage: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is destroyed or dropped while an update is under way, or after a forward that
    has failed.
    """

    def run(rank: int, model: torch.nn.Module) -> Any:
        engine = opened(model, way, stage, tmp_path)
        train(engine, rank, range(2))
        assert held_files(tmp_path) and update_threads()
        if how in ("exception", "interrupt"):
            kind = ValueError if how == "exception" else KeyboardInterrupt
            model.blocks[1].register_forward_pre_hook(
                lambda module, args: (_ for _ in ()).throw(kind("stop"))
            )
            with pytest.raises(kind, match="stop"):
                train(engine, rank, range(2, 3))
        if how == "destroy":
            engine.destroy()
            engine.destroy()

    on_ranks(1, run)
    for _ in range(200):  # an engine whose update is under way stays until that is over
        gc.collect()
        if not update_threads():
            break
        time.sleep(0.05)
    assert not update_threads() and not held_files(tmp_path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind", [ValueError, pytest.param(KeyboardInterrupt, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("way, stage", [*WAYS, ("all on cpu", 3)])
def test_training_goes_on_after_a_forward_that_failed(
    way: str, stage: int, kind: type[BaseException], tmp_path: Path
) -> None:
    def run(rank: int, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        engine = opened(model, way, stage, tmp_path)
        for step in range(3):
            fails = model.blocks[1].register_forward_pre_hook(
                lambda module, args: (_ for _ in ()).throw(kind("stop"))
            )
            with pytest.raises(kind, match="stop"):
                engine(torch.ones(2, 7))
            fails.remove()
            train(engine, rank, range(step, step + 1))
        weights = full_weights(engine)
        engine.destroy()
        return weights

    same(on_ranks(2, run)[0], after(2, stage, 3))


def test_two_engines_share_a_disk(tmp_path: Path) -> None:
    def run(
        rank: int, model: torch.nn.Module, other: torch.nn.Module
    ) -> list[dict[str, torch.Tensor]]:
        first, second = (
            opened(model, "all in files", 3, tmp_path),
            opened(other, "optimizer in files", 2, tmp_path),
        )
        for step in range(3):
            train(first, rank, range(step, step + 1))
            train(second, rank, range(step, step + 1))
        first.destroy(gather=True)
        weights = [dict(model.named_parameters()), full_weights(second)]
        second.destroy()
        return weights

    from tests.helpers.stacks import stack

    others = [stack() for _ in range(2)]
    want = after(2, 3, 3)
    for found in on_ranks(2, lambda rank, model: run(rank, model, others[rank])):
        for weights in found:
            same({name: value.detach() for name, value in weights.items()}, want)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.full((7,), float(place))


@pytest.mark.parametrize(
    "way, stage", [("optimizer on cpu", 0), ("optimizer in files", 0), ("all in files", 3)]
)
def test_workers_of_a_data_loader_are_forked_beside_an_update(
    way: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = threading.Event()
    run_update = Update.run

    def slow(self: Update, *args: Any) -> None:
        forked.wait(20.0)
        run_update(self, *args)

    def run(rank: int, model: torch.nn.Module, beside: bool) -> dict[str, torch.Tensor]:
        engine = opened(model, way, stage, tmp_path)
        for _ in range(2):
            loader = torch.utils.data.DataLoader(
                Rows(), batch_size=3, num_workers=2, multiprocessing_context="fork"
            )
            batches = iter(loader)
            forked.set()
            for batch in batches:
                engine.backward(engine(batch).pow(2).mean())
                if beside:
                    engine.updater.finish()
                    forked.clear()
                engine.step()
                if not beside or batch[0, 0] == 0:
                    forked.set()
        forked.set()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want = on_ranks(1, run, False)[0]
    monkeypatch.setattr(Update, "run", slow)
    same(on_ranks(1, run, True)[0], want)


@pytest.mark.turns
@pytest.mark.parametrize("way, stage", WAYS)
@pytest.mark.parametrize("what", ["full", "missing"])
def test_a_disk_that_one_rank_cannot_use_is_found_before_anything_changes(
    way: str, stage: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look at what is free, which other processes may take meanwhile."""
    monkeypatch.setenv("HF_ZERO_PREFLIGHT", "0")
    take = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if "rank1" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        take(descriptor, offset, length)

    if what == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)

    def run(rank: int, model: torch.nn.Module) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        folder = tmp_path / "gone" if what == "missing" and rank == 1 else tmp_path
        error: type[Exception] = (
            RankMismatchError if rank == 0 else DiskSpaceError if what == "full" else ConfigError
        )
        with pytest.raises(
            error,
            match="rank 1 could not take the room"
            if rank == 0
            else "needed for .*rank 1|not a directory",
        ):
            opened(model, way, stage, folder)
        for name, value in model.named_parameters():
            assert type(value) is torch.nn.Parameter and torch.equal(value, before[name])
        if what == "missing":  # the same model trains where there is a disk
            engine = opened(model, way, stage, tmp_path)
            train(engine, rank, range(3))
            found.append(full_weights(engine))
            engine.destroy()

    found: list[dict[str, torch.Tensor]] = []
    on_ranks(2, run)
    for weights in found:
        same(weights, after(2, stage, 3))
    gc.collect()
    assert not list(tmp_path.iterdir())
