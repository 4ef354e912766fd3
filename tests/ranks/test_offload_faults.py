"""Disks that fail under a running engine, and what else goes on beside an update."""

from __future__ import annotations

import errno
import gc
import os
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hf_zero.errors import (
    CheckpointError,
    ConfigError,
    DiskSpaceError,
    OffloadError,
    RankMismatchError,
)
from hf_zero.offload import nvme_files
from hf_zero.offload.sub_group_update import SubGroupUpdate
from hf_zero.ops.files import parse_faults
from tests.helpers import offloads
from tests.helpers.cells import in_turn
from tests.helpers.engines import full_weights
from tests.helpers.offloads import Values, ended, offload, same, train, trained
from tests.helpers.processes import run_processes
from tests.helpers.stacks import on_each_rank, on_ranks, squared, stack
from tests.helpers.training import At


def opened(model, way, stage, folder):
    section = offload(way, stage, folder, max_in_cpu=0)
    return offloads.opened(model, section, gradient_clipping=1.0)


def inject(engine, fault):
    """``fault`` happens on this rank from now on, as HF_ZERO_IO_FAULT would have it on all."""
    for files in engine.sharded_model.placement.files._files.values():
        files._queue.inject(parse_faults(fault))


def after(steps, stage):
    """Weights on two ranks without any fault, on the device."""
    return trained({"stage": stage}, ranks=2, steps=steps, gradient_clipping=1.0)


def test_a_disk_that_is_full_loses_no_step(tmp_path):
    """On one rank of two: the next step is refused on both, and what is saved goes on elsewhere."""
    way, stage, fault = "all in files", 3, "write:2+:ENOSPC"
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()

    def run(rank, model):
        engine = opened(model, way, stage, disk)
        train(engine, rank, range(2))
        engine.updater.finish()
        engine.sharded_model.placement.files.write_error()
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

    def resume(rank, model):
        engine = offloads.opened(model, {"stage": 3 - stage}, gradient_clipping=1.0)
        engine.load_checkpoint(str(saved))
        assert engine.global_steps == 3
        train(engine, rank, range(3, 5))
        return ended(engine)

    want_three, want_five = after(3, stage), after(5, stage)
    on_ranks(2, run)
    same(on_ranks(2, resume)[0], want_five)


@in_turn(
    "way, stage, fault",
    [
        ("all in files", 3, "read:1+:short,write:1+:short"),
        ("optimizer in files", 2, "read:2:slow=30,write:3:slow=30"),
    ],
)
def test_short_and_slow_transfers_change_nothing(way, stage, fault, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_IO_FAULT", fault)

    section = offload(way, stage, tmp_path, max_in_cpu=0)
    same(trained(section, ranks=2, steps=3, gradient_clipping=1.0), after(3, stage))


def test_o_direct_that_is_refused_in_mid_run_is_said_once(tmp_path, monkeypatch, heard):
    # stands for O_DIRECT on any file system
    monkeypatch.setattr(nvme_files, "open_direct", lambda path: os.open(path, os.O_RDWR))

    def run(rank, model):
        engine = opened(model, "optimizer in files", 2, tmp_path)
        train(engine, rank, range(2))
        engine.updater.finish()
        assert not any("O_DIRECT" in message for message in heard)
        inject(engine, "write:1:EINVAL")
        train(engine, rank, range(2, 5))
        return ended(engine)

    same(on_ranks(1, run)[0], trained({"stage": 2}, ranks=1, steps=5, gradient_clipping=1.0))
    assert [message for message in heard if "O_DIRECT" in message] == [
        f"the file system of nvme_path {tmp_path} takes no O_DIRECT: transfers go "
        "through the page cache"
    ]


@on_each_rank(1)
def test_what_cannot_be_read_is_said_wherever_it_is_needed_and_never_saved(rank, model, tmp_path):
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()

    engine = opened(model, "all in files", 3, disk)
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
    gc.collect()
    assert not list(disk.iterdir())


def trained_by_workers(way, stage, folder, beside):
    """Weights after steps whose batches workers load, forked beside an update or between."""
    forked = threading.Event()
    run_update = SubGroupUpdate.run

    def slow(self, *args):
        forked.wait(60.0)
        run_update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        if beside:
            patch.setattr(SubGroupUpdate, "run", slow)
        engine = opened(stack(), way, stage, folder)
        for _ in range(2):
            rows: Any = [torch.full((7,), float(place)) for place in range(6)]
            batches = iter(DataLoader(rows, 3, num_workers=2, multiprocessing_context="fork"))
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
        return ended(engine)


def trained_both_ways(rank, folder):
    same(*(trained_by_workers("all in files", 3, folder, beside) for beside in (True, False)))


def test_workers_of_a_data_loader_are_forked_beside_an_update(tmp_path):
    run_processes(1, trained_both_ways, tmp_path)


@in_turn("way, stage, what", [("optimizer in files", 2, "missing"), ("all in files", 3, "full")])
def test_a_disk_that_one_rank_cannot_use_is_found_before_anything_changes(
    way, stage, what, tmp_path, monkeypatch
):
    """After the look at what is free, which other processes may take meanwhile."""
    monkeypatch.setenv("HF_ZERO_PREFLIGHT", "off")
    take = os.posix_fallocate

    def full(descriptor, offset, length):
        if "rank1" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        take(descriptor, offset, length)

    if what == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)

    def run(rank, model):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        folder = tmp_path / "gone" if what == "missing" and rank == 1 else tmp_path
        error, said = RankMismatchError, "rank 1 could not take the room"
        if rank == 1:
            error = DiskSpaceError if what == "full" else ConfigError
            said = "needed for .*rank 1|not a directory"
        with pytest.raises(error, match=said):
            opened(model, way, stage, folder)
        for name, value in model.named_parameters():
            assert type(value) is torch.nn.Parameter and torch.equal(value, before[name])
        if what == "missing":  # the same model trains where there is a disk
            engine = opened(model, way, stage, tmp_path)
            train(engine, rank, range(3))
            found.append(ended(engine))

    found: list[Values] = []
    on_ranks(2, run)
    for weights in found:
        same(weights, after(3, stage))
    gc.collect()
    assert not list(tmp_path.iterdir())
