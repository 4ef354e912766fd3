"""Disks that fail under a running engine, and what else goes on beside an update."""

from __future__ import annotations

import errno
import gc
import os
import threading

import pytest
import torch

from hf_zero.errors import (
    CheckpointError,
    ConfigError,
    DiskSpaceError,
    OffloadError,
    RankMismatchError,
)
from hf_zero.offload.sub_group_update import Update
from hf_zero.ops.files import parse_faults
from tests.helpers import offloads
from tests.helpers.cells import in_turn
from tests.helpers.engines import full_weights
from tests.helpers.offloads import Values, ended, offload, same, train, trained
from tests.helpers.processes import run_processes
from tests.helpers.stacks import on_ranks, squared, stack
from tests.helpers.training import At

WAYS = [("optimizer in files", 0), ("optimizer in files", 2), ("all in files", 3)]


def opened(model, way, stage, folder):
    section = offload(way, stage, folder, max_in_cpu=0)
    return offloads.opened(model, section, gradient_clipping=1.0)


def inject(engine, fault):
    """``fault`` happens on this rank from now on, as HF_ZERO_IO_FAULT would have it on all."""
    for files in engine.sharded_model.placement._files.values():
        files._queue.inject(parse_faults(fault))


def after(steps, stage):
    """Weights on two ranks without any fault, on the device."""
    return trained({"stage": stage}, ranks=2, steps=steps, gradient_clipping=1.0)


@in_turn(
    "way, stage, fault",
    [("optimizer in files", 2, "write:7+:EIO"), ("all in files", 3, "write:2+:ENOSPC")],
)
def test_a_disk_that_is_full_loses_no_step(way, stage, fault, tmp_path):
    """On one rank of two: the step is complete, the next one is refused on both, and what is
    saved goes on elsewhere.
    """
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()

    def run(rank, model):
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
        ("optimizer in files", 0, "read:1+:short,write:1+:short"),
        ("all in files", 3, "read:1+:short,write:1+:short"),
        ("optimizer in files", 2, "read:2:slow=30,write:3:slow=30"),
    ],
)
def test_short_and_slow_transfers_change_nothing(way, stage, fault, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_IO_FAULT", fault)

    section = offload(way, stage, tmp_path, max_in_cpu=0)
    same(trained(section, ranks=2, steps=3, gradient_clipping=1.0), after(3, stage))


@in_turn("way, stage", WAYS[1:])
def test_what_cannot_be_read_is_said_wherever_it_is_needed_and_never_saved(way, stage, tmp_path):
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()

    def run(rank, model):
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


def test_two_engines_share_a_disk(tmp_path):
    others = [stack() for _ in range(2)]

    def run(rank, model):
        first = opened(model, "all in files", 3, tmp_path)
        second = opened(others[rank], "optimizer in files", 2, tmp_path)
        for step in range(3):
            train(first, rank, range(step, step + 1))
            train(second, rank, range(step, step + 1))
        first.destroy(gather=True)
        return [{name: p.detach() for name, p in model.named_parameters()}, ended(second)]

    want = after(3, 3)
    for found in on_ranks(2, run):
        for weights in found:
            same(weights, want)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, place):
        return torch.full((7,), float(place))


def trained_by_workers(rank, way, stage, folder, beside):
    """Return the weights after steps whose batches forked workers load: while an update is under
    way, which waits until they are forked, or between updates.
    """
    forked = threading.Event()
    run_update = Update.run

    def slow(self, *args):
        forked.wait(60.0)
        run_update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        if beside:
            patch.setattr(Update, "run", slow)
        engine = opened(stack(), way, stage, folder)
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
        return ended(engine)


def trained_both_ways(rank, places, folder):
    """Whether both come to the same weights, for each of ``places``."""
    for way, stage in places:
        between, beside = (
            trained_by_workers(rank, way, stage, folder, each) for each in (False, True)
        )
        same(beside, between)


def test_workers_of_a_data_loader_are_forked_beside_an_update(tmp_path):
    run_processes(1, trained_both_ways, [("optimizer on cpu", 0), *WAYS[::2]], tmp_path)


@in_turn("way, stage, what", [(*WAYS[0], "full"), (*WAYS[1], "missing"), (*WAYS[2], "full")])
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
            found.append(ended(engine))

    found: list[Values] = []
    on_ranks(2, run)
    for weights in found:
        same(weights, after(3, stage))
    gc.collect()
    assert not list(tmp_path.iterdir())
