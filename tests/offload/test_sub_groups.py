"""Offloaded training state by sub_group and as a whole, in memory and in files."""

from collections.abc import Callable

import pytest
import torch

from hf_zero.offload.nvme import BufferPool, NvmeStorage
from hf_zero.offload.nvme_files import NvmeFiles
from hf_zero.offload.storage import MASTER, HostStorage, Storage, StorageFormat
from hf_zero.ops.host import Blocks

SUB_GROUPS = [(0, 4096), (4096, 8192), (8192, 8201), (8201, 9001)]
NUMEL = 9001
Open = Callable[[], Storage]


def zeros(numel, dtype):
    return torch.zeros(numel, dtype=dtype)


def in_files(folder, count=3, **how):
    pool = BufferPool(count, zeros, **how)
    return NvmeStorage(
        "layer|trainable|float32", NUMEL, SUB_GROUPS, NvmeFiles([folder], 0), pool
    ), pool


@pytest.fixture(params=["memory", "files", "files, one buffer", "files, nothing ahead or behind"])
def storage(request, tmp_path):
    if request.param == "memory":
        return HostStorage(NUMEL, SUB_GROUPS, zeros)
    if request.param == "files, one buffer":
        return in_files(tmp_path, 1)[0]
    if "nothing" in request.param:
        return in_files(tmp_path, prefetches=False, write_behind=False)[0]
    return in_files(tmp_path)[0]


def update(storage, order):
    for at, sub_group in enumerate(order):
        held = storage.acquire(sub_group)
        if at + 1 < len(order):
            storage.prefetch(order[at + 1])
        for name, array in held.items():
            if isinstance(array, Blocks):
                array.encode(array.decode() + 1)
            else:
                array += 1 if name == MASTER else 2
        storage.release(sub_group)


def test_sub_groups_are_changed_in_place_and_read_as_a_whole(storage):
    storage.add(MASTER, StorageFormat(torch.float32))
    storage.add("exp_avg", StorageFormat(torch.bfloat16))
    storage.add("sum", StorageFormat(torch.float32))
    storage.store("sum", 0, torch.full((NUMEL,), 0.5))
    storage.store(MASTER, 0, torch.arange(NUMEL).float())
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]):
        update(storage, order)
    assert storage.names() == [MASTER, "exp_avg", "sum"]
    assert torch.equal(storage.fetch(MASTER), torch.arange(NUMEL).float() + 3)
    assert storage.fetch("exp_avg").eq(6).all() and storage.fetch("exp_avg").dtype == torch.bfloat16
    assert storage.fetch("sum").eq(6.5).all()


def test_a_range_over_sub_groups_is_overwritten(storage):
    storage.add(MASTER, StorageFormat(torch.float32))
    update(storage, [0, 1, 2, 3])
    storage.prefetch(1)  # and must not come back with the old values
    storage.store(MASTER, 4090, torch.full((4200,), -1.0))
    want = torch.ones(NUMEL)
    want[4090:8290] = -1
    assert torch.equal(storage.fetch(MASTER), want)
    update(storage, [1, 2])
    want[4096:8201] += 1
    assert torch.equal(storage.fetch(MASTER), want)


def test_moments_in_eight_bits_take_a_quarter_and_a_scale(storage):
    storage.add(MASTER, StorageFormat(torch.float32))
    storage.add("exp_avg_sq", StorageFormat(torch.float32, blocks=True, signed=False))
    values = torch.rand(NUMEL)
    storage.store("exp_avg_sq", 0, values)
    got = storage.fetch("exp_avg_sq")
    assert got.dtype == torch.float32 and (got - values).abs().max() < 0.05
    storage.store("exp_avg_sq", 0, got)
    assert torch.equal(storage.fetch("exp_avg_sq"), got), "what was decoded is encoded as it was"
    held = storage.acquire(2)["exp_avg_sq"]
    assert isinstance(held, Blocks) and torch.equal(held.decode(), got[8192:8201])
    storage.release(2)


def test_bytes_by_tier(tmp_path):
    memory, (files, pool) = HostStorage(NUMEL, SUB_GROUPS, zeros), in_files(tmp_path)
    for storage in (memory, files):
        storage.add(MASTER, StorageFormat(torch.float32))
        storage.add("exp_avg", StorageFormat(torch.bfloat16))
    assert memory.nbytes() == {"device": 0, "ram": NUMEL * 6, "disk": 0}
    # of the two long sub_groups, four and two pages each; the short ones take a page for each array
    pages = 6 * 4096
    assert files.nbytes() == {"device": 0, "ram": 0, "disk": 2 * pages + 4 * 4096}
    assert pool.nbytes == 3 * pages


def test_a_sub_group_that_cannot_be_written_stays_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "write:3+:ENOSPC")
    storage, pool = in_files(tmp_path)
    storage.add(MASTER, StorageFormat(torch.float32))
    for _ in range(3):
        update(storage, [0, 1, 2, 3])
    assert storage.fetch(MASTER).eq(3).all()
    assert isinstance(pool.write_error, OSError) and "No space left" in str(pool.write_error)
    storage.store(MASTER, 8190, torch.zeros(4))
    assert storage.fetch(MASTER)[8188:8196].tolist() == [3, 3, 0, 0, 0, 0, 3, 3]


def test_a_read_that_fails_raises_with_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "read:2+:EIO")
    storage, _ = in_files(tmp_path)
    storage.add(MASTER, StorageFormat(torch.float32))
    storage.acquire(0)
    storage.release(0)
    with pytest.raises(OSError, match="Input/output error") as raised:
        storage.acquire(1)
    assert str(tmp_path) in str(raised.value.filename)
    storage.close()


def test_a_read_that_has_failed_once_can_be_repeated(tmp_path, monkeypatch):
    """Its buffer is free again: there are no more of them than three."""
    monkeypatch.setenv("HF_ZERO_IO_FAULT", "read:1:EIO,read:2:EIO,read:3:EIO")
    storage, _ = in_files(tmp_path)
    storage.add(MASTER, StorageFormat(torch.float32))
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error"):
            storage.acquire(1)
    update(storage, [1])
    assert storage.fetch(MASTER)[4096:8192].eq(1).all()


def test_a_fetch_leaves_an_acquired_sub_group_to_its_release(tmp_path):
    storage, _ = in_files(tmp_path)
    storage.add(MASTER, StorageFormat(torch.float32))
    held = storage.acquire(1)[MASTER]
    assert isinstance(held, torch.Tensor) and not storage.fetch(MASTER).any()
    held += 1
    storage.release(1)
    assert storage.fetch(MASTER)[4096:8192].eq(1).all()
